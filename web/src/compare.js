/** Two episodes side by side: samples of a task, builders of a session, checkpoints on a task. */

import { answers, messageBox } from './conversation.js';
import { append, count, h, many, said } from './dom.js';
import { nameOf, rewardMark, trainedOf } from './episode.js';
import { ends } from './filters.js';
import { to } from './place.js';
import { around, parting } from './tokens.js';

/** @import {Episode, Row, Strand} from './types.js' */
/** @import {Store} from './blocks.js' */

/**
 * @param {Store} store
 * @param {number} e
 * @param {number} other
 */
export async function comparePage(store, e, other) {
  const sides = [e, other].map((at) => ({ at, row: store.rows[at], text: store.texts(store.rows[at]) }));
  const episodes = await Promise.all(sides.map(({ at }) => store.episode(at)));
  const page = h('main', { class: 'compare' });
  page.append(h('header', { class: 'head' }, h('a', { href: to({ other: null }) }, '← episode'), h('h1', {}, 'Side by side')),
    h('div', { class: 'pair' }, ...sides.map(({ row, at }) => h('section', { class: 'card' }, h('h2', {}, h('a', { href: to({ e: at, other: null }) }, ...nameOf(row)), ' ', rewardMark(row)), facts(row, store.rows[at === e ? other : e])))),
    traces(episodes));
  const tests = outcomes(episodes);
  if (tests) page.append(tests);
  const [one, two] = episodes.map((episode) => main(episode));
  if (one && two) page.append(part(one, two, sides), words(one, two));
  return page;
}

/** @param {Episode} episode */
const main = (episode) => episode.strands.find((strand) => strand.trace && strand.kind === 'main') ?? episode.strands[0];

/**
 * @param {Row} row
 * @param {Row} other
 */
function facts(row, other) {
  const others = new Map(told(other));
  return h('dl', { class: 'facts' }, ...told(row).flatMap(([name, value]) => [h('dt', {}, name), h('dd', { class: value === others.get(name) ? 'quiet' : 'differs' }, said(value))]));
}

/** @param {Row} row @returns {[string, unknown][]} */
function told(row) {
  return [['file', row.source], ['model', row.model], ['weights', row.version ?? 'never set'], ['harness', row.harness], ['builder', row.builder],
    ['ended', ends(row)], ['calls', row.calls], ['sampled', count(row.sampled)], ['trainable', count(row.trainable)], ['breaks', row.breaks.length],
    ...(row.branched ? [/** @type {[string, unknown]} */ (['branched from', `${row.branched}, after ${count(row.shared)} tokens`])] : [])];
}

/** @param {Episode[]} episodes */
function traces(episodes) {
  return h('div', { class: 'pair' }, ...episodes.map((episode) => h('section', { class: 'card' }, h('h2', {}, many(episode.strands.filter((strand) => strand.trace).length, 'trace')),
    h('table', {}, h('tbody', {}, ...episode.strands.filter((strand) => strand.trace).map((strand) => h('tr', {}, h('td', {}, strand.kind), h('td', { class: 'number' }, many(strand.turns.length, 'call')),
      h('td', { class: 'number' }, `${trainedOf(strand)} tokens`))))))));
}

/** @param {Episode[]} episodes */
function outcomes(episodes) {
  const [one, two] = episodes.map((episode) => /** @type {Record<string, string>} */ (episode.evaluation?.tests ?? {}));
  const names = [...new Set([...Object.keys(one), ...Object.keys(two)])].filter((name) => one[name] !== two[name]);
  if (!names.length) return null;
  return h('section', { class: 'card' }, h('h2', {}, `${many(names.length, 'test')} with different outcomes`),
    h('table', { class: 'tests' }, h('tbody', {}, ...names.map((name) => h('tr', {}, ...[one, two].map((tests) => h('td', { class: tests[name] === 'PASSED' ? 'good' : 'bad' }, said(tests[name] ?? '–'))), h('td', {}, said(name)))))));
}

/**
 * @param {Strand} one
 * @param {Strand} two
 * @param {{row: Row, text: (id: number) => string}[]} sides
 */
function part(one, two, sides) {
  const at = parting(one.ids, two.ids);
  const same = at === one.ids.length && at === two.ids.length;
  return h('section', { class: 'card', id: 'parting' }, h('h2', {}, same ? `The ${count(at)} tokens are the same` : `The tokens part at position ${count(at)}`),
    ...(same ? [] : [one, two].flatMap((strand, side) => [h('h3', {}, ...nameOf(sides[side].row)), around(strand, at, sides[side].text)])));
}

/** A message without the ids of its tool calls, which are different in every session. @param {any} message */
const plain = (message) => JSON.stringify([message.role, message.content, message.reasoning, message.tool_calls?.map((/** @type {any} */ made) => made.function)]);

/**
 * @param {Strand} one
 * @param {Strand} two
 */
function words(one, two) {
  let same = 0;
  while (same < Math.min(one.messages.length, two.messages.length) && plain(one.messages[same]) === plain(two.messages[same])) same++;
  const columns = [one, two].map((strand) => {
    const calls = answers(strand);
    const column = h('div', { class: 'conversation' });
    append(column, strand.messages.slice(same).map((message, place) => messageBox(message, calls[same + place], (call) => to({ tab: 'tokens', call, other: null }))));
    return column;
  });
  return h('section', {}, h('h2', {}, same ? `The first ${many(same, 'message')} are the same` : 'No message is the same'), h('div', { class: 'pair' }, ...columns));
}
