/** Tokens, drawn as they come into view, and forgotten when they are far from it. */

import { h } from './dom.js';

/** @import {Strand} from './types.js' */

const CHUNK = 256;
const SLACK = 64;

/**
 * Return where the chunks of a strand begin: every 256 tokens, or at the end of the line, if that is near.
 * @param {Strand} strand
 * @param {(id: number) => string} text
 */
function starts(strand, text) {
  const places = [0];
  for (let at = CHUNK; at < strand.ids.length; at += CHUNK) {
    const to = Math.min(at + SLACK, strand.ids.length);
    let end = at;
    while (end < to && !text(strand.ids[end - 1]).endsWith('\n')) end++;
    at = end < to ? end : at;
    places.push(at);
  }
  return places;
}

/** Probabilities of a sampled token at which its colour changes. */
const LIKELY = [0.99, 0.9, 0.7, 0.5, 0.3, 0.1, 0.01];

/** @param {number} logprob */
const heat = (logprob) => { const p = Math.exp(logprob); const at = LIKELY.findIndex((bound) => p >= bound); return `h${at < 0 ? LIKELY.length : at}`; };

/**
 * Return the turn that a token was sampled in.
 * @param {Strand} strand
 * @param {number} at
 */
export const turnOf = (strand, at) => strand.turns.find(([, start, end]) => at >= start && at < end);

/**
 * Return the least and the greatest finite value.
 * @param {Float32Array} values
 */
const range = (values) => values.reduce(([low, high], value) => (Number.isFinite(value) ? [Math.min(low, value), Math.max(high, value)] : [low, high]), [Infinity, -Infinity]);

/**
 * Return what the colours of a trainer's values say.
 * @param {Float32Array} values
 */
export function scale(values) {
  const [low, high] = range(values);
  const names = low < 0 && high > 0 ? ['n3', 'n2', 'n1', 'p1', 'p2', 'p3'] : ['h0', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6', 'h7'];
  return low <= high && h('span', { class: 'legend' }, low.toPrecision(3), ...names.map((name) => h('span', { class: `t on ${name}` }, '\u00a0\u00a0')), high.toPrecision(3));
}

/**
 * Return the name of a token's colour.
 * @param {Strand} strand
 * @param {string} colour
 * @returns {(at: number) => string}
 */
function colours(strand, colour) {
  if (colour === 'mask') return () => '';
  if (colour === 'kept' && strand.kept) {
    const kept = strand.kept;
    return (at) => (kept[at] ? `h${Math.min(7, Math.floor(Math.log2(kept[at])))}` : '');
  }
  const values = Object.hasOwn(strand.values, colour) ? strand.values[colour] : null;
  if (!values) return (at) => (strand.mask[at] || strand.logprobs[at] ? heat(strand.logprobs[at]) : '');
  const [low, high] = range(values);
  if (low < 0 && high > 0) {
    const largest = Math.max(-low, high);
    return (at) => Number.isFinite(values[at]) ? `${values[at] < 0 ? 'n' : 'p'}${Math.round((3 * Math.abs(values[at])) / largest)}` : '';
  }
  return (at) => Number.isFinite(values[at]) ? `h${Math.round((7 * (values[at] - low)) / (high - low || 1))}` : '';
}

/**
 * Return what a piece looks like: line ends stay, and are shown too.
 * @param {string} text
 */
const shown = (text) => text.replaceAll('\n', '↵\n').replaceAll('\t', '→\t');

/**
 * Return one token as an element.
 * @param {Strand} strand
 * @param {number} at
 * @param {(id: number) => string} text
 * @param {string} extra
 */
function token(strand, at, text, extra) {
  return h('span', { class: `t ${strand.mask[at] ? 'on' : 'off'} ${extra}`, 'data-at': at }, shown(text(strand.ids[at])));
}

/**
 * Return all tokens of a strand. `chosen` is told the token that is clicked.
 * @param {Strand} strand
 * @param {(id: number) => string} text
 * @param {string} colour
 * @param {number | null} marked
 * @param {(at: number) => void} chosen
 */
export function tokens(strand, text, colour, marked, chosen) {
  const list = h('div', { class: 'tokens', role: 'list', 'aria-label': 'tokens' });
  const nameOf = colours(strand, colour);
  const begins = new Set(strand.turns.map(([, start]) => start));
  const versions = [...new Set(strand.versions.map((each) => each.version))];
  /** @param {number} at */
  const band = (at) => {
    const version = strand.versions.find((each) => at >= each.start && at < each.end);
    return version ? `v${versions.indexOf(version.version) % 4}` : '';
  };
  /** @param {HTMLElement} chunk */
  const fill = (chunk) => {
    if (chunk.dataset.full) return;
    chunk.dataset.full = 'yes';
    const [from, to] = [Number(chunk.dataset.from), Number(chunk.dataset.to)];
    const body = h('div', { class: 'text' });
    for (let at = from; at < to; at++)
      body.append(token(strand, at, text, `${nameOf(at)} ${band(at)} ${begins.has(at) ? 'begins' : ''} ${at === marked ? 'marked' : ''}`));
    chunk.append(body);
    chunk.style.minHeight = '';
  };
  /** @param {HTMLElement} chunk @param {number} height */
  const empty = (chunk, height) => {
    chunk.style.minHeight = `${height}px`;
    chunk.lastElementChild?.remove();
    delete chunk.dataset.full;
  };
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting, boundingClientRect } of entries) {
        const chunk = /** @type {HTMLElement} */ (target);
        if (isIntersecting) fill(chunk);
        else if (chunk.dataset.full) empty(chunk, boundingClientRect.height);
      }
    },
    { rootMargin: '1200px' },
  );
  const bounds = [...starts(strand, text), strand.ids.length];
  const chunks = bounds.slice(0, -1).map((from, place) => h('div', { class: 'chunk', role: 'listitem', 'data-from': from, 'data-to': bounds[place + 1] }, h('span', { class: 'at' }, String(from))));
  for (const chunk of chunks) seen.observe(chunk);
  list.append(...chunks);
  list.addEventListener('click', (event) => {
    const found = /** @type {HTMLElement} */ (event.target).closest('[data-at]');
    if (found) chosen(Number(/** @type {HTMLElement} */ (found).dataset.at));
  });
  if (marked !== null && marked < strand.ids.length) {
    const at = bounds.findLastIndex((bound) => bound <= marked);
    chunks.slice(Math.max(0, at - 4), at + 4).forEach(fill);
    settle(list, 8);
  }
  return list;
}

/**
 * Bring the marked token into view, again for some frames: chunks above it become as high as they are when drawn.
 * @param {HTMLElement} list
 * @param {number} frames
 */
function settle(list, frames) {
  requestAnimationFrame(() => {
    list.querySelector('.marked')?.scrollIntoView({ block: 'center' });
    if (frames) settle(list, frames - 1);
  });
}

/**
 * Return a few tokens around a position.
 * @param {Strand} strand
 * @param {number} at
 * @param {(id: number) => string} text
 * @param {number} [end]  Where the sequence that is shown ends, if it is not the strand's end.
 */
export function around(strand, at, text, end = strand.ids.length) {
  const line = h('div', { class: 'around' });
  for (let place = Math.max(0, at - 24); place < Math.min(at + 24, end); place++)
    line.append(token(strand, place, text, place === at ? 'marked' : ''));
  if (at >= end) line.append(h('span', { class: 'odd marked' }, 'end'));
  return line;
}

/**
 * Return the first position at which two sequences differ.
 * @param {Int32Array} one
 * @param {Int32Array} other
 */
export function parting(one, other) {
  const length = Math.min(one.length, other.length);
  let at = 0;
  while (at < length && one[at] === other[at]) at++;
  return at;
}
