/** The questions that can be asked of a run, and the sessions that are left after some answers were chosen. */

/** @import {Row} from './types.js' */

/**
 * @typedef {object} Question
 * @property {string} id
 * @property {string} title
 * @property {string} unit  What the numbers count.
 * @property {(row: Row) => Record<string, number>} answers  Answer -> how much of it the session has.
 * @property {boolean} [ordered]  Whether answers are numbers: kept in order, and drawn as a distribution.
 */

/** @param {Row} row */
export const passed = (row) => row.resolved ?? (row.reward !== null && row.reward >= 1);

/** @param {Row} row */
export const failed = (row) => row.failure !== null || row.reward === null || !passed(row);

/** @param {string | null} key @returns {Record<string, number>} */
const one = (key) => (key === null ? {} : { [key]: 1 });

/**
 * Return the bucket of a number: 1, 2 and 5 times a power of ten are the bounds.
 * @param {number} value
 */
export function bucket(value) {
  if (value <= 0) return '0';
  const power = 10 ** Math.floor(Math.log10(value));
  const low = [5, 2, 1].map((step) => step * power).find((bound) => value >= bound) ?? power;
  const high = low === 5 * power ? 10 * power : low === 2 * power ? 5 * power : 2 * power;
  /** @param {number} bound */
  const short = (bound) => (bound >= 1e6 ? `${bound / 1e6}M` : bound >= 1000 ? `${bound / 1000}k` : String(Number(bound.toPrecision(1))));
  return `${short(low)}–${short(high)}`;
}

/** @param {number[]} values */
function buckets(values) {
  /** @type {Record<string, number>} */
  const counts = Object.create(null);
  for (const value of values) counts[bucket(value)] = (counts[bucket(value)] ?? 0) + 1;
  return counts;
}

/** @param {Row} row */
function rewardOf(row) {
  if (row.reward === null) return 'none';
  return Number.isInteger(row.reward * 10) ? String(row.reward) : `${(Math.floor(row.reward * 10) / 10).toFixed(1)}…`;
}

/** @param {Row} row */
export const ends = (row) => row.failure ? row.failure.kind : row.truncated ? (passed(row) ? 'passed, truncated' : `truncated: ${row.truncated}`) : passed(row) ? 'passed' : 'not passed';

/** @param {Row} row @returns {Record<string, number>} */
function balance(row) {
  const unsent = Object.values(row.unsent).reduce((sum, each) => sum + each, 0);
  return { trainable: row.trainable, ...row.excluded, ...(unsent ? { 'never sent': unsent } : {}) };
}

/** @param {Row} row @returns {Record<string, number>} */
function continuations(row) {
  return Object.fromEntries(Object.entries({ spliced: row.spliced, 'templated, held': row.canonical, broken: row.breaks.length }).filter(([, n]) => n));
}

/** @param {[string, number][]} pairs */
function total(pairs) {
  /** @type {Record<string, number>} */
  const sums = Object.create(null);  // a name may be that of a property of all objects
  for (const [key, value] of pairs) sums[key] = (sums[key] ?? 0) + value;
  return sums;
}

/** @param {number} low */
const share = (low) => `${low}–${low + 10} %`;

/** @param {Row} row */
const reuse = (row) => row.prompt === null ? {} : one(share(10 * Math.min(9, Math.floor(10 * (1 - row.prefill / row.prompt)))));

/** @type {Question[]} */
export const QUESTIONS = [
  { id: 'reward', title: 'Reward', unit: 'sessions', answers: (row) => one(rewardOf(row)), ordered: true },
  { id: 'end', title: 'How sessions ended', unit: 'sessions', answers: (row) => one(ends(row)) },
  { id: 'balance', title: 'Sampled tokens', unit: 'tokens', answers: balance },
  { id: 'break', title: 'Breaks by cause', unit: 'breaks', answers: (row) => total(row.breaks.map(([cause]) => [cause, 1])) },
  { id: 'position', title: 'Breaks by position', unit: 'breaks', answers: (row) => buckets(row.breaks.flatMap(([, at]) => at ?? [])), ordered: true },
  { id: 'continuation', title: 'Continuations', unit: 'calls', answers: continuations },
  { id: 'kind', title: 'Traces by kind', unit: 'traces', answers: (row) => row.kinds },
  { id: 'tool', title: 'Tool calls', unit: 'calls', answers: (row) => total(row.tools.map(([name, , n]) => [name, n])) },
  { id: 'attempt', title: 'Tool calls by outcome', unit: 'calls', answers: (row) => total(row.tools.map(([, status, n]) => [status, n])) },
  { id: 'latency', title: 'Seconds of a call', unit: 'calls', answers: (row) => buckets(row.latency), ordered: true },
  { id: 'reuse', title: 'Prompt tokens of earlier calls', unit: 'sessions', answers: reuse, ordered: true },
  { id: 'calls', title: 'Calls of a session', unit: 'sessions', answers: (row) => buckets([row.calls]), ordered: true },
  { id: 'sampled', title: 'Sampled tokens of a session', unit: 'sessions', answers: (row) => buckets([row.sampled]), ordered: true },
  { id: 'staleness', title: 'Staleness', unit: 'sessions', answers: (row) => one(row.staleness === null ? null : String(row.staleness)), ordered: true },
  { id: 'version', title: 'Weights at the start', unit: 'sessions', answers: (row) => one(row.version) },
  { id: 'harness', title: 'Harness', unit: 'sessions', answers: (row) => one(row.harness) },
  { id: 'builder', title: 'Builder', unit: 'sessions', answers: (row) => one(row.builder) },
  { id: 'model', title: 'Model', unit: 'sessions', answers: (row) => one(row.model) },
  { id: 'node', title: 'Node', unit: 'sessions', answers: (row) => one(row.node) },
  { id: 'source', title: 'File', unit: 'sessions', answers: (row) => one(row.source) },
  { id: 'task', title: 'Task', unit: 'sessions', answers: (row) => one(row.task) },
];

/** @type {WeakMap<Row, Record<string, number>[]>} */
const asked = new WeakMap();

/** @param {Row} row */
function answersOf(row) {
  let answers = asked.get(row);
  if (!answers) asked.set(row, (answers = QUESTIONS.map((question) => question.answers(row))));
  return answers;
}

/**
 * Return the places of the rows that have a chosen answer to every question; `except`: a question that does not count.
 * Variants of other rows are not among them.
 * @param {Row[]} rows
 * @param {Map<string, Set<string>>} chosen
 * @param {string} [except]
 */
export function left(rows, chosen, except) {
  const wanted = QUESTIONS.flatMap((question, place) => {
    const answers = chosen.get(question.id);
    return answers && question.id !== except ? [{ place, answers: [...answers] }] : [];
  });
  /** @type {number[]} */
  const places = [];
  rows.forEach((row, place) => {
    const told = wanted.length ? answersOf(row) : [];
    if (!row.variant && wanted.every((each) => each.answers.some((answer) => Object.hasOwn(told[each.place], answer)))) places.push(place);
  });
  return places;
}

/**
 * Return the answers to a question with their sums, most first or in order, over rows that the others leave.
 * @param {Row[]} rows
 * @param {Map<string, Set<string>>} chosen
 * @param {Question} question
 * @returns {[string, number][]}
 */
export function sums(rows, chosen, question) {
  const at = QUESTIONS.indexOf(question);
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const answer of chosen.get(question.id) ?? []) counts.set(answer, 0);
  for (const place of left(rows, chosen, question.id))
    for (const [answer, n] of Object.entries(answersOf(rows[place])[at])) counts.set(answer, (counts.get(answer) ?? 0) + n);
  return [...counts].sort(question.ordered ? (one, other) => size(one[0]) - size(other[0]) : (one, other) => other[1] - one[1]);
}

/** @param {string} label */
function size(label) {
  const value = parseFloat(label);
  const unit = /^[\d.]+([kM])/.exec(label)?.[1];
  return Number.isNaN(value) ? -Infinity : value * (unit === 'M' ? 1e6 : unit === 'k' ? 1e3 : 1);
}
