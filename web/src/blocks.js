/** Decodes the data of the page: rows at once, an episode when it is looked at. */

import { told } from './stream.js';

/** @import {Episode, Row, Strand} from './types.js' */

/** @param {string} text */
function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let place = 0; place < binary.length; place++) bytes[place] = binary.charCodeAt(place);
  return bytes;
}

/** @param {string} text  Compressed bytes as base64. */
async function inflated(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const utf8 = new TextDecoder();

/** @param {string} id */
const embedded = (id) => document.getElementById(id)?.textContent ?? '';

/** @param {string} id */
const embeddedJson = async (id) => JSON.parse(utf8.decode(await inflated(embedded(id))));

const KEPT = 12;

/** All episodes of the page. */
export class Store {
  /** @type {Row[]} */
  rows = [];
  /** @type {Record<string, Record<string, string>>} Tokenizer -> id -> text. */
  pieces = {};
  /** @type {string[]} The data of episodes that came from the server. */
  #fetched = [];
  /** @type {Map<number, Promise<Episode>>} */
  #decoded = new Map();

  /** Read what is in the page itself. */
  async open() {
    [this.rows, this.pieces] = await Promise.all([embeddedJson('rows'), embeddedJson('pieces')]);
  }

  /**
   * Add episodes as the server tells of them, as long as it does.
   * @param {(said: string) => void} changed
   */
  async follow(changed) {
    for await (const lines of told('episodes')) {
      let problem = '';
      for (const line of lines) problem = this.#add(line) || problem;
      changed(problem);
    }
  }

  /** @param {{row: Row, pieces: Record<string, string>, data: string, error?: string}} told */
  #add(told) {
    if (told.error) return told.error;
    const name = told.row.tokenizer ?? '';
    this.pieces[name] = Object.assign(this.pieces[name] ?? {}, told.pieces);
    this.#fetched[this.rows.length] = told.data;
    this.rows.push(told.row);
    return '';
  }

  /**
   * @param {number} place
   * @returns {Promise<Episode>}
   */
  episode(place) {
    const known = this.#decoded.get(place);
    if (known) return known;
    const episode = inflated(this.#fetched[place] ?? embedded(`e${place}`)).then(decode);
    this.#decoded.set(place, episode);
    if (this.#decoded.size > KEPT) this.#decoded.delete(/** @type {number} */ (this.#decoded.keys().next().value));
    return episode;
  }

  /**
   * Return the function that gives the text of an id; an id without text is shown as a number.
   * @param {Row} row
   * @returns {(id: number) => string}
   */
  texts(row) {
    const pieces = this.pieces[row.tokenizer ?? ''] ?? {};
    return (id) => pieces[id] ?? `⟨${id}⟩`;
  }
}

/**
 * Return the numbers of a column, whose bytes lie in planes.
 * @param {Uint8Array} bytes
 * @param {number} base
 * @param {[string, number, number]} column
 */
function numbers(bytes, base, [kind, count, offset]) {
  const size = Number(kind[1]);
  const flat = new Uint8Array(count * size);
  for (let plane = 0, from = base + offset; plane < size; plane++)
    for (let place = plane; place < flat.length; place += size) flat[place] = bytes[from++];
  if (kind === 'i4') return new Int32Array(flat.buffer);
  if (kind === 'f4') return new Float32Array(flat.buffer);
  return kind === 'f2' ? halves(new Uint16Array(flat.buffer)) : flat;
}

/** @param {Uint16Array} bits  IEEE 754 binary16. */
function halves(bits) {
  const values = new Float32Array(bits.length);
  for (let place = 0; place < bits.length; place++) {
    const exponent = (bits[place] >> 10) & 31;
    const fraction = bits[place] & 1023;
    const size = exponent === 31 ? (fraction ? NaN : Infinity)
      : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
    values[place] = bits[place] & 0x8000 ? -size : size;
  }
  return values;
}

/**
 * @param {Uint8Array} bytes
 * @returns {Episode}
 */
function decode(bytes) {
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(utf8.decode(bytes.subarray(4, 4 + length)));
  /** @param {any} column @returns {any} */
  const column = (column) => column && numbers(bytes, 4 + length, column);
  /** @type {Strand[]} */
  const strands = [];
  for (const told of head.strands) {
    const ids = new Int32Array(told.length);
    if (told.keep) ids.set(strands[told.base].ids.subarray(0, told.keep));
    ids.set(column(told.ids), told.keep);
    const values = Object.fromEntries(Object.entries(told.values).map(([name, each]) => [name, column(each)]));
    strands.push({
      ...told, ids, values,
      mask: column(told.mask), logprobs: column(told.logprobs), kept: column(told.kept),
      messages: told.messages.map((/** @type {number} */ place) => head.messages[place]),
      tools: told.tools.map((/** @type {number} */ place) => head.messages[place]),
    });
  }
  const recorded = head.calls.length > 0;
  return { ...head, strands, recorded, calls: recorded ? head.calls : callsOf(strands, head.fidelity.breaks) };
}

/**
 * Return what traces and breaks tell of the calls, where the journal is not known.
 * @param {Strand[]} strands
 * @param {import('./types.js').Break[]} breaks
 * @returns {import('./types.js').Call[]}
 */
function callsOf(strands, breaks) {
  /** @type {Map<string, import('./types.js').Call>} */
  const calls = new Map();
  for (const strand of strands) {
    strand.turns.forEach(([call_id, start, end], place) => {
      if (calls.has(call_id)) return;
      const broken = breaks.find((each) => each.call_id === call_id);
      const parent_id = place ? strand.turns[place - 1][0] : broken?.parent_id ?? null;
      calls.set(call_id, {
        call_id, index: calls.size, parent_id, continuation: parent_id ? 'continued' : 'root',
        splice_cause: broken?.cause ?? null, outcome: 'delivered', finish_reason: null, started_at: null,
        duration: null, error: null, error_kind: null, sampling_mismatch: [], hints: { kind: strand.kind },
        frozen: null, replayed: null, prompt: start, sampled: end - start, excluded: null,
      });
    });
  }
  return [...calls.values()];
}
