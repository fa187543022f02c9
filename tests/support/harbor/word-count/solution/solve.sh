#!/bin/sh
wc -w < text.txt > count.txt
