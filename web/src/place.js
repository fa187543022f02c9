/** Where the reader is: all of it is in the address, so that every view can be linked to. */

/**
 * @typedef {object} Place
 * @property {number | null} e  The episode; null: the run page.
 * @property {number | null} other  The episode beside it.
 * @property {string} tab
 * @property {number} strand
 * @property {string | null} call
 * @property {number | null} token
 * @property {string} colour  What the tokens' colours say.
 * @property {Map<string, Set<string>>} filters
 */

/** @param {string | null} text */
const number = (text) => (text !== null && /^\d+$/.test(text) ? Number(text) : null);

/** @param {string} hash @returns {Place} */
export function read(hash) {
  const values = new URLSearchParams(hash.replace(/^#/, ''));
  /** @type {Map<string, Set<string>>} */
  const filters = new Map();
  for (const [name, value] of values)
    if (name.startsWith('f.')) filters.set(name.slice(2), (filters.get(name.slice(2)) ?? new Set()).add(value));
  return {
    e: number(values.get('e')), other: number(values.get('with')), tab: values.get('tab') ?? 'conversation',
    strand: number(values.get('strand')) ?? 0, call: values.get('call'), token: number(values.get('token')),
    colour: values.get('colour') ?? 'logprob', filters,
  };
}

/** @param {Place} place */
export function hashOf(place) {
  const values = new URLSearchParams();
  if (place.e !== null) {
    values.set('e', String(place.e));
    if (place.other !== null) values.set('with', String(place.other));
    if (place.tab !== 'conversation') values.set('tab', place.tab);
    if (place.strand) values.set('strand', String(place.strand));
    if (place.call) values.set('call', place.call);
    if (place.token !== null) values.set('token', String(place.token));
    if (place.colour !== 'logprob') values.set('colour', place.colour);
  }
  for (const [name, chosen] of place.filters) for (const value of chosen) values.append(`f.${name}`, value);
  return `#${values}`;
}

/** @returns {Place} */
export const here = () => read(location.hash);

/**
 * Return the address of a place that differs from the present one in some respects.
 * @param {Partial<Place>} change
 */
export const to = (change) => hashOf({ ...here(), ...change });

/** What is particular to an episode, as it is when another one is opened. */
export const FRESH = { other: null, strand: 0, call: null, token: null };

/** @param {Partial<Place>} change */
export function go(change) {
  location.hash = to(change);
}
