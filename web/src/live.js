/** The page of a rollout server: what it does now, and the curves of training runs. It changes nothing. */

import { count, h, list, many, said, svg } from './dom.js';
import { merged, Refused, told } from './stream.js';

/** @typedef {Record<string, any>} Live  `polar_gym.protocol.Live`. */

const STAGES = ['init', 'ready', 'run', 'postrun'];
const AGAIN = 2000;
/** Seconds between a node's heartbeats, and some more. */
const SILENT = 10;
const page = /** @type {HTMLElement} */ (document.getElementById('page'));
const note = h('div', { class: 'note-bar', role: 'status' });
document.body.append(note);

/** @param {number} bytes */
const size = (bytes) => (bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);

/** @param {Record<string, number>} counts */
const listed = (counts) => Object.entries(counts).map(([name, n]) => `${count(n)} ${name.toLowerCase()}`).join(', ') || 'none';

/**
 * @param {string} title
 * @param {string} about
 * @param {...(Node | false)} parts
 */
const card = (title, about, ...parts) => h('section', { class: 'card wide' }, h('h2', {}, title, h('span', { class: 'quiet' }, ` ${about}`)), ...parts);

/** @param {Live} live */
function headline(live) {
  return h('header', { class: 'head' }, h('h1', {}, 'Rollout server'),
    ...[[live.live_tasks, 'tasks live'], [live.waiting, 'samples waiting'], [Object.keys(live.nodes).length, 'nodes alive'], [Object.keys(live.sessions).length, 'sessions running'], [live.episodes.accepted ?? 0, 'episodes accepted'], [live.retried, 'retried']]
      .map(([n, name]) => h('span', { class: 'figure' }, h('b', {}, count(n)), ` ${n === 1 ? name.replace('s ', ' ') : name}`)),
    h('span', { class: 'quiet' }, 'weights ', said(live.weight_version ?? 'never set')), live.generation.paused && h('span', { class: 'flag' }, 'model calls are paused'));
}

/** @param {Live} live */
function totals(live) {
  const { stored, keep, refuse, free } = live.disk;
  /** @type {[string, string][]} */
  const facts = [['tasks that ended', listed(live.ended_tasks)], ['episodes', listed(live.episodes)], ['failures by kind', listed(live.failures)],
    ['disk', `${size(stored)} of episodes; fetched ones go above ${size(keep)}, new tasks are refused above ${size(refuse)}; ${size(free)} free`]];
  return card('Since the server was started', '', h('dl', { class: 'facts', id: 'totals' }, ...facts.flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, said(value))])));
}

/**
 * @typedef {object} Part  A part of the page.
 * @property {HTMLElement} element
 * @property {() => void} draw
 */

/** @type {Live} */
let live = {};

/**
 * A card with a list, of which only items that have changed are drawn again.
 * @param {string} title
 * @param {string[] | null} heads  Of a table's columns; null: the items are sections.
 * @param {() => [any[][], string]} find  Gives the items, each with its key first, and what is said beside the title.
 * @param {(...item: any[]) => (import('./dom.js').Child | import('./dom.js').Child[])[]} make  Gives the children of an item.
 * @param {Node | false} tool
 * @returns {Part}
 */
function listing(title, heads, find, make, tool = false) {
  const about = h('span', { class: 'quiet' });
  const none = h('p', { class: 'quiet' }, 'none');
  const body = h(heads ? 'tbody' : 'div', {});
  const table = heads ? h('table', {}, h('thead', {}, h('tr', {}, ...heads.map((head) => h('th', {}, head)))), body) : body;
  const { more, draw } = list(body, (...item) => (heads ? h('tr', {}, ...make(...item).map((cell) => h('td', {}, ...[cell].flat()))) : h('section', { class: 'session' }, ...make(...item).flat())), heads ? 12 : 20);
  return { element: h('section', { class: 'card wide' }, h('h2', {}, title, ' ', about), tool, none, table, more), draw: () => {
    const [items, beside] = find();
    about.textContent = beside;
    none.hidden = items.length > 0;
    table.hidden = items.length === 0;
    draw(items);
  } };
}

const wanted = /** @type {HTMLInputElement} */ (h('input', { type: 'search', 'aria-label': 'filter sessions', placeholder: 'task, node, harness, stage, words', size: 40, oninput: () => sessions.draw() }));

/** Return a button that shows the sessions with a word. @param {string} word */
const filter = (word) => h('button', { class: 'plain', title: 'show its sessions', onclick: () => { wanted.value = word; sessions.draw(); sessions.element.scrollIntoView(); } }, said(word));

/** @type {Part} */
const nodes = listing('Nodes', ['node', 'engine', 'waiting', ...STAGES, 'last heard', ''],
  () => [Object.values(live.nodes).map(({ node, heartbeat, draining, silent_seconds }) => [node, node, heartbeat, draining, silent_seconds < SILENT ? 0 : Math.floor(silent_seconds), live.unreached[node]]), 'sessions of places'],
  (node, heartbeat, draining, silent, unreached) => [filter(node), [said(heartbeat.engine.name), ' ', said(heartbeat.engine.model)], count(heartbeat.waiting),
    ...STAGES.map((stage) => [`${heartbeat.held[stage]} of ${heartbeat.places[stage]} `, h('span', { class: 'room' }, heartbeat.held[stage] > 0 && h('span', { class: 'bar', 'width%': (100 * heartbeat.held[stage]) / (heartbeat.places[stage] || 1) }))]),
    silent ? `${count(silent)} s ago` : 'now', [draining && h('span', { class: 'flag' }, 'draining'), unreached && h('span', { class: 'flag bad' }, said(unreached))]]);

/** @type {Part} */
const tasks = listing('Tasks', ['task', 'harness', 'status', 'waiting', 'placed', 'ended', 'usable', 'failures'],
  () => {
    const all = Object.values(live.tasks).sort((one, other) => other.created_at - one.created_at);
    const rest = live.live_tasks - all.length;
    return [all.map((task) => [task.task_id, task]), rest ? `the newest; ${count(rest)} more are live` : 'the newest first'];
  },
  (task) => [filter(task.task_id), said(task.harness), task.status.toLowerCase(), ...['waiting', 'placed', 'ended'].map((phase) => count(task.samples[phase] ?? 0)), count(task.usable), said(Object.keys(task.failures).length ? listed(task.failures) : '')]);

/** @param {any} each */
const headOf = ({ session, calls }) => [session.task_id, ` #${session.sample_index}`, session.attempt > 0 && ` attempt ${session.attempt}`,
  ` · ${session.status.toLowerCase()} · ${session.harness} on ${session.node ?? 'no node'}`, calls !== undefined && ` · ${many(calls, 'call')}`, session.weight_version !== undefined && ` · weights ${session.weight_version}`];

/** @type {Part} */
const sessions = listing('Sessions', null,
  () => {
    const words = wanted.value.toLowerCase().split(/\s+/);
    const all = Object.entries(live.sessions).map(([key, each]) => [key, each, live.behind[each.session.weight_version]]);
    const left = all.filter(([, each]) => {
      const text = [...headOf(each), ...each.lines.flat()].join('\n').toLowerCase();
      return words.every((word) => text.includes(word));
    });
    left.sort(([, { session: one }], [, { session: other }]) => (one.task_id < other.task_id ? -1 : one.task_id > other.task_id ? 1 : one.sample_index - other.sample_index));
    return [left, left.length < all.length ? `${count(left.length)} of ${count(all.length)}` : `${count(all.length)} have begun`];
  },
  (each, behind) => {
    const [task, ...facts] = headOf(each);
    return [h('h3', {}, said(task), h('span', { class: 'quiet' }, ...facts.map((fact) => fact && said(fact))), behind > 0 && h('span', { class: 'flag' }, `${many(behind, 'version')} behind`)),
      ...each.lines.map((/** @type {[string, string]} */ [role, text]) => h('div', { class: `message ${/^\w+$/.test(role) ? role : ''}` }, h('header', {}, said(role)), h('div', { class: 'words' }, text)))];
  }, wanted);

/** @type {[string, (line: any) => [number, number] | null][]} Title, and the point of a line of `steps.jsonl`. */
const CURVES = [
  ['reward, training tasks', (line) => ('step' in line ? [line.step, line.reward] : null)],
  ['reward, held-out tasks', (line) => ('evaluated' in line && !line.greedy && !('harness' in line) ? [line.evaluated, line.reward] : null)],
  ['sampled tokens of a session', (line) => ('step' in line && line.sessions ? [line.step, line.sampled / line.sessions] : null)],
  ['KL of the update, nats a token', (line) => ('kl' in line ? [line.step, line.kl] : null)],
  ['mean ratio of the update', (line) => ('ratio' in line ? [line.step, line.ratio] : null)],
];

/** @param {Live} live */
function runs(live) {
  const colour = (/** @type {number} */ at) => `var(--part${[3, 1, 5, 2, 6, 4, 7, 0][at % 8]})`;
  const names = live.runs.map((/** @type {any} */ run, /** @type {number} */ at) => h('span', {}, h('span', { class: `swatch part${[3, 1, 5, 2, 6, 4, 7, 0][at % 8]}` }), said(`${run.name}, ${run.seed === null ? 'seed unknown' : `seed ${run.seed}`}`), run.problem && h('span', { class: 'flag bad' }, said(run.problem))));
  return card('Training runs', '', h('p', { class: 'legend' }, ...names), h('div', { class: 'cards' }, ...CURVES.map(([title, point]) => {
    /** @type {[number, number][][]} */
    const curves = live.runs.map((/** @type {any} */ run) => run.lines.map(point).filter((/** @type {any} */ each) => each && each.every(Number.isFinite)));
    const flat = curves.flat();
    if (!flat.length) return false;
    const right = Math.max(...flat.map(([x]) => x), 1);
    const share = title.startsWith('reward');
    const low = Math.min(share ? 0 : Infinity, ...flat.map(([, y]) => y));
    const high = Math.max(share ? 1 : -Infinity, ...flat.map(([, y]) => y), low + 1e-9);
    const at = (/** @type {[number, number]} */ [x, y]) => `${((300 * x) / right).toFixed(1)},${(96 - (92 * (y - low)) / (high - low)).toFixed(1)}`;
    const picture = svg('svg', { viewBox: '0 0 300 100', class: 'curve', role: 'img', 'aria-label': title, preserveAspectRatio: 'none' },
      ...curves.filter((curve) => curve.length).map((curve) => svg('polyline', { points: curve.map(at).join(' '), fill: 'none', stroke: colour(curves.indexOf(curve)), 'stroke-width': 2, 'vector-effect': 'non-scaling-stroke' })));
    const last = curves.flatMap((curve) => curve.slice(-1)).map(([, y]) => Number(y.toPrecision(3)));
    return h('figure', { class: 'run-curve' }, h('h3', {}, title), h('div', { class: 'framed' }, /** @type {any} */ (picture)), h('figcaption', {}, `${Number(low.toPrecision(3))} to ${Number(high.toPrecision(3))} over ${count(right)} steps; last: ${last.join(', ')}`));
  })));
}

/**
 * A part of the page that is drawn whole where what it is drawn from has changed.
 * @param {(live: Live) => HTMLElement} make
 * @param {(live: Live) => unknown[]} from
 * @returns {Part}
 */
function whole(make, from) {
  /** @type {unknown[]} */
  let known = [];
  /** @type {Part} */
  const part = { element: h('section', {}), draw: () => {
    const now = from(live);
    if (known.length && now.every((each, place) => each === known[place])) return;
    known = now;
    const next = make(live);
    part.element.replaceWith(next);
    part.element = next;
  } };
  return part;
}

const PARTS = [
  whole(headline, (live) => [live.live_tasks, live.waiting, Object.keys(live.nodes).length, Object.keys(live.sessions).length, live.episodes, live.retried, live.weight_version, live.generation]),
  nodes,
  tasks,
  whole(totals, (live) => [live.ended_tasks, live.episodes, live.failures, size(live.disk.stored), size(live.disk.free)]),
  whole((live) => (live.runs.length ? runs(live) : h('section', {})), (live) => [live.runs]),
  sessions,
];
const main = h('main', { class: 'run live' }, ...PARTS.map((part) => part.element));

/** Draw what has changed, so that what a reader has selected or opened stays. */
function show() {
  for (const part of PARTS) part.draw();
  if (!main.isConnected) page.replaceChildren(main);
  note.textContent = `as of ${new Date(1000 * live.at).toLocaleTimeString()}`;
  document.body.dataset.ready = 'yes';
}

/** @returns {Promise<void>} Done when a key was given. */
function askKey() {
  return new Promise((done) => {
    const input = /** @type {HTMLInputElement} */ (h('input', { type: 'password', autocomplete: 'off', 'aria-label': 'key', required: true, size: 50 }));
    page.replaceChildren(h('main', { class: 'run' }, h('header', { class: 'head' }, h('h1', {}, 'Rollout server')),
      h('form', { class: 'card wide', onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); sessionStorage.setItem('key', input.value.trim()); done(); } },
        h('p', {}, 'This server asks for the trainers’ key (POLAR_GYM_SERVICE_KEY). It stays in this tab.'), input, ' ', h('button', {}, 'show'))));
    input.focus();
    document.body.dataset.ready = 'key';
  });
}

for (;;) {
  const key = sessionStorage.getItem('key');
  try {
    live = {};
    for await (const patches of told('v1/live?follow=true', key ? { Authorization: `Bearer ${key}` } : {})) {
      live = patches.reduce(merged, live);
      show();
    }
    note.textContent = 'the server has ended';
  } catch (error) {
    note.textContent = `not following: ${/** @type {Error} */ (error).message}`;
    if (error instanceof Refused && error.status === 401) {
      note.textContent = key ? 'the server refused this key' : '';
      sessionStorage.removeItem('key');
      await askKey();
      continue;
    }
  }
  await new Promise((done) => setTimeout(done, AGAIN));
}
