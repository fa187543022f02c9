/** The page of a rollout server: what it does now, and the curves of training runs. It changes nothing. */

import { count, h, many, said, some, svg } from './dom.js';
import { Refused, told } from './stream.js';

/** @typedef {Record<string, any>} Live  `polar_gym.protocol.Live`. */

const STAGES = ['init', 'ready', 'run', 'postrun'];
const AGAIN = 2000;
const page = /** @type {HTMLElement} */ (document.getElementById('page'));
const note = h('div', { class: 'note-bar', role: 'status' });
document.body.append(note);

/** @param {number} bytes */
const size = (bytes) => (bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);

/** @param {Record<string, number>} counts */
const listed = (counts) => Object.entries(counts).map(([name, n]) => `${count(n)} ${name.toLowerCase()}`).join(', ') || 'none';

/**
 * @param {string[]} heads
 * @param {any[]} items
 * @param {(item: any) => (import('./dom.js').Child | import('./dom.js').Child[])[]} cells
 */
function table(heads, items, cells) {
  const body = h('tbody', {});
  some(body, items, (item) => h('tr', {}, ...cells(item).map((cell) => h('td', {}, ...[cell].flat()))));
  return items.length ? h('table', {}, h('thead', {}, h('tr', {}, ...heads.map((head) => h('th', {}, head)))), body) : h('p', { class: 'quiet' }, 'none');
}

/**
 * @param {string} title
 * @param {string} about
 * @param {...(Node | false)} parts
 */
const card = (title, about, ...parts) => h('section', { class: 'card wide' }, h('h2', {}, title, h('span', { class: 'quiet' }, ` ${about}`)), ...parts);

/** @param {Live} live */
function headline(live) {
  return h('header', { class: 'head' }, h('h1', {}, 'Rollout server'),
    ...[[live.live_tasks, 'tasks live'], [live.waiting, 'samples waiting'], [live.nodes.length, 'nodes alive'], [live.transcripts.length, 'sessions running'], [live.episodes.accepted ?? 0, 'episodes accepted'], [live.retried, 'retried']]
      .map(([n, name]) => h('span', { class: 'figure' }, h('b', {}, count(n)), ` ${name}`)),
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

/** @param {Live} live */
function nodes(live) {
  return card('Nodes', 'sessions of places', table(['node', 'engine', 'waiting', ...STAGES, 'last heard', ''], live.nodes, (/** @type {any} */ { node, heartbeat, draining, silent_seconds }) => [
    said(node), [said(heartbeat.engine.name), ' ', said(heartbeat.engine.model)], count(heartbeat.waiting),
    ...STAGES.map((stage) => [`${heartbeat.held[stage]} of ${heartbeat.places[stage]} `, h('span', { class: 'room' }, heartbeat.held[stage] > 0 && h('span', { class: 'bar', 'width%': (100 * heartbeat.held[stage]) / (heartbeat.places[stage] || 1) }))]),
    `${Math.floor(silent_seconds)} s ago`, [draining && h('span', { class: 'flag' }, 'draining'), live.unreached[node] && h('span', { class: 'flag bad' }, said(live.unreached[node]))]]));
}

/** @param {Live} live */
function tasks(live) {
  const rest = live.live_tasks - live.tasks.length;
  return card('Tasks', rest ? `the newest; ${count(rest)} more` : 'the newest first', table(['task', 'harness', 'status', 'waiting', 'placed', 'ended', 'usable', 'failures'], live.tasks, (task) => [
    said(task.task_id), said(task.harness), task.status.toLowerCase(), ...['waiting', 'placed', 'ended'].map((phase) => count(task.samples[phase] ?? 0)), count(task.usable), said(Object.keys(task.failures).length ? listed(task.failures) : '')]));
}

/** @param {Live} live */
function sessions(live) {
  const known = new Map(live.transcripts.map((/** @type {any} */ each) => [`${each.session_id}.${each.attempt}`, each]));
  const all = live.nodes.flatMap((/** @type {any} */ node) => node.heartbeat.sessions.filter((/** @type {any} */ each) => /^(INITIALIZING|READY|RUNNING|BUILDING|EVALUATING)$/.test(each.status)));
  const list = h('div', {});
  some(list, all, (session) => {
    const transcript = known.get(`${session.session_id}.${session.attempt}`);
    const behind = live.behind[session.weight_version];
    return h('section', { class: 'session' },
      h('h3', {}, said(session.task_id), ` #${session.sample_index}`, session.attempt > 0 && ` attempt ${session.attempt}`, h('span', { class: 'quiet' }, ' · ', session.status.toLowerCase(), ' · ', said(session.harness), ' on ', said(session.node),
        transcript && ` · ${many(transcript.calls, 'call')}`, session.weight_version !== null && ' · weights ', session.weight_version !== null && said(session.weight_version)),
      behind > 0 && h('span', { class: 'flag' }, `${many(behind, 'version')} behind`)),
      ...(transcript?.lines ?? []).map((/** @type {[string, string]} */ [role, text]) => h('div', { class: `message ${/^\w+$/.test(role) ? role : ''}` }, h('header', {}, said(role)), h('div', { class: 'words' }, text))));
  }, 20);
  return card('Sessions', `${count(all.length)} have begun`, list);
}

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

/** @type {[(live: Live) => HTMLElement, (live: Live) => unknown][]} Each part of the page, and what it is drawn from. */
const PARTS = [
  [headline, (live) => [live.live_tasks, live.waiting, live.nodes.length, live.transcripts.length, live.episodes, live.retried, live.weight_version, live.generation]],
  [nodes, (live) => [live.unreached, live.nodes.map((/** @type {any} */ each) => [Math.floor(each.silent_seconds), each.draining, each.heartbeat.held, each.heartbeat.waiting])]],
  [tasks, (live) => [live.live_tasks, live.tasks]],
  [totals, (live) => [live.ended_tasks, live.episodes, live.failures, size(live.disk.stored), size(live.disk.free)]],
  [runs, (live) => live.runs],
  [sessions, (live) => [live.transcripts, live.behind, live.nodes.map((/** @type {any} */ node) => node.heartbeat.sessions)]],
];

/** @type {string[]} */
let drawn = [];
/** @type {any[]} */
let known = [];

/** Draw the parts that have changed, so that what a reader has selected or opened stays. @param {Live} live */
function show(live) {
  live.runs = known = live.runs ?? known;
  if (!drawn.length) page.replaceChildren(h('main', { class: 'run live' }, ...PARTS.map(() => h('section', {}))));
  const main = /** @type {HTMLElement} */ (page.firstElementChild);
  PARTS.forEach(([draw, of], place) => {
    const now = JSON.stringify(of(live)) ?? '';
    if (drawn[place] === now) return;
    drawn[place] = now;
    main.children[place].replaceWith(draw === runs && !known.length ? h('section', {}) : draw(live));
  });
  note.textContent = `as of ${new Date(1000 * live.at).toLocaleTimeString()}`;
  document.body.dataset.ready = 'yes';
}

/** @returns {Promise<void>} Done when a key was given. */
function askKey() {
  drawn = [];
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
    for await (const states of told('v1/live?follow=true', key ? { Authorization: `Bearer ${key}` } : {})) show(states.at(-1));
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
