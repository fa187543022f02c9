/** A conversation as the model saw it: messages in chat form, nothing cut. */

import { h, many, pre, said } from './dom.js';

/** @import {Message, Strand} from './types.js' */

/** @param {any} content */
export function textOf(content) {
  if (content === null || content === undefined) return '';
  if (typeof content === 'string') return content;
  if (Array.isArray(content)) return content.map((part) => (typeof part?.text === 'string' ? part.text : `[${part?.type ?? 'part'}]`)).join('\n');
  return JSON.stringify(content, null, 1);
}

/** @param {string} text */
function pretty(text) {
  try {
    const value = JSON.parse(text);
    return Object.entries(value).map(([name, each]) => `${name}: ${typeof each === 'string' ? each : JSON.stringify(each)}`).join('\n');
  } catch {
    return text;
  }
}

/**
 * Return the call that each of a strand's messages is the answer to: the last answers are those of its calls.
 * @param {Strand} strand
 * @returns {(string | null)[]}
 */
export function answers(strand) {
  const calls = strand.turns.map(([call]) => call);
  return strand.messages.map((message) => message.role === 'assistant').reverse()
    .map((asked) => (asked ? calls.pop() ?? null : null)).reverse();
}

/**
 * @param {Message} message
 * @param {string | null} call
 * @param {(call: string) => string} link
 */
export function messageBox(message, call, link) {
  const box = h('section', { class: `message ${/^\w+$/.test(message.role) ? message.role : ''}`, 'data-call': call ?? undefined });
  const name = message.role === 'tool' ? `tool ${message.name ?? ''}` : message.role;
  box.append(h('header', {}, said(name), call && h('a', { class: 'quiet', href: link(call) }, 'tokens')));
  const thought = textOf(message.reasoning ?? message.reasoning_content);
  if (thought) box.append(h('details', { class: 'thought', open: true }, h('summary', {}, 'reasoning'), pre(thought)));
  const text = textOf(message.content);
  if (text) box.append(message.role === 'tool' ? pre(text) : h('div', { class: 'words', tabIndex: /^(system|developer)$/.test(message.role) ? 0 : undefined }, text));
  for (const made of message.tool_calls ?? [])
    box.append(h('div', { class: 'made' }, h('b', {}, said(made.function?.name)), pre(pretty(made.function?.arguments ?? ''))));
  return box;
}

/**
 * @param {Strand} strand
 * @param {(call: string) => string} link
 */
export function conversation(strand, link) {
  const calls = answers(strand);
  const whole = h('div', { class: 'conversation' });
  if (strand.tools.length) {
    const names = strand.tools.map((tool) => tool.function?.name).join(', ');
    whole.append(h('details', { class: 'offered' }, h('summary', {}, `${many(strand.tools.length, 'tool')}: `, said(names)), pre(JSON.stringify(strand.tools, null, 2))));
  }
  strand.messages.forEach((message, place) => whole.append(messageBox(message, calls[place], link)));
  return whole;
}
