/** Looks for text in messages, or for ids in tokens, through all episodes. */

import { answers, textOf } from './conversation.js';
import { hashOf } from './place.js';

/** @import {Store} from './blocks.js' */

const ENOUGH = 200;

/**
 * Yield what is found: an address, and the words around it. `id:12,13` looks for these ids.
 * @param {Store} store
 * @param {number[]} places  Episodes, in the order in which to look.
 * @param {string} query
 * @returns {AsyncGenerator<{place: number, href: string, words: string} | null>}  null: another episode was looked at.
 */
export async function* search(store, places, query) {
  const ids = /^id:\s*\d+(\s*,\s*\d+)*$/.test(query) ? query.slice(3).split(',').map(Number) : null;
  const wanted = query.toLowerCase();
  const base = { other: null, strand: 0, call: null, token: null, tab: 'conversation', colour: 'logprob', filters: new Map() };
  let found = 0;
  for (const place of places) {
    const episode = await store.episode(place);
    const text = store.texts(store.rows[place]);
    const told = new Set();
    for (const [strand, whole] of episode.strands.entries()) {
      const { ids: tokens, messages } = whole;
      if (ids) {
        for (let at = tokens.indexOf(ids[0]); at >= 0 && found < ENOUGH; at = tokens.indexOf(ids[0], at + 1)) {
          if (!ids.every((id, step) => tokens[at + step] === id)) continue;
          found++;
          const words = [...tokens.subarray(Math.max(0, at - 6), at + 8)].map(text).join('');
          yield { place, href: hashOf({ ...base, e: place, tab: 'tokens', strand, token: at }), words };
        }
        continue;
      }
      for (const message of messages) {
        if (told.has(message)) continue;
        told.add(message);
        const words = [textOf(message.reasoning), textOf(message.content), ...(message.tool_calls ?? []).map((/** @type {any} */ made) => `${made.function?.name} ${made.function?.arguments}`)].join('\n');
        const at = words.toLowerCase().indexOf(wanted);
        if (at < 0) continue;
        found++;
        yield { place, href: hashOf({ ...base, e: place, strand, call: answers(whole)[messages.indexOf(message)] }), words: `${message.role}: ${words.slice(Math.max(0, at - 40), at + 80)}` };
      }
    }
    if (found >= ENOUGH) return;
    yield null;
  }
}
