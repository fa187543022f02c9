/** The page of all episodes: distributions that filter each other, tasks, stages over time, sessions. */

import { count, h, many, said, seconds, some } from './dom.js';
import { nameOf, rewardMark } from './episode.js';
import { ends, left, passed, QUESTIONS, sums } from './filters.js';
import { FRESH, go, to } from './place.js';
import { CAUSES, STAGES } from './types.js';

/** @import {Row} from './types.js' */
/** @import {Store} from './blocks.js' */
/** @import {Place} from './place.js' */

/** How many answers a card shows. */
const ANSWERS = 12;

/**
 * @param {Store} store
 * @param {Place} place
 */
export function runPage(store, place) {
  const { rows } = store;
  const whole = left(rows, new Map()).length;
  const places = left(rows, place.filters);
  const cards = QUESTIONS.filter((question) => question.id !== 'task').map((question) => card(rows, place, question));
  return h('main', { class: 'run' },
    h('header', { class: 'head' }, h('h1', {}, 'Run'), ...headline(rows, places, whole), h('span', { class: 'grow' }), ...chips(place)),
    h('div', { class: 'cards' }, ...cards),
    tasks(rows, places, place), timeline(rows, places), sessions(rows, places));
}

/**
 * @param {Row[]} rows
 * @param {number[]} places
 * @param {number} whole
 */
function headline(rows, places, whole) {
  const chosen = places.map((at) => rows[at]);
  const scored = chosen.filter((row) => row.reward !== null);
  const mean = scored.reduce((sum, row) => sum + Number(row.reward), 0) / (scored.length || 1);
  /** @param {(row: Row) => number} of */
  const total = (of) => count(chosen.reduce((sum, row) => sum + of(row), 0));
  return [
    h('span', { class: 'figure', id: 'shown' }, h('b', {}, count(places.length)), places.length === whole ? (whole === 1 ? ' session' : ' sessions') : ` of ${count(whole)} sessions`),
    h('span', { class: 'figure' }, h('b', {}, scored.length ? mean.toFixed(3) : '–'), ' mean reward'),
    h('span', { class: 'figure' }, h('b', {}, `${count(chosen.filter(passed).length)}`), ' passed'),
    h('span', { class: 'figure' }, h('b', {}, count(chosen.length - scored.length)), ' masked'),
    h('span', { class: 'figure' }, h('b', {}, total((row) => row.trainable)), ' of ', total((row) => row.sampled), ' sampled tokens trainable'),
  ];
}

/** @param {Place} place */
function chips(place) {
  const made = [...place.filters].flatMap(([id, answers]) => [...answers].map((answer) =>
    h('button', { class: 'chip', onclick: () => toggle(place, id, answer), title: 'remove this filter' }, QUESTIONS.find((each) => each.id === id)?.title ?? id, ': ', said(answer), ' ×')));
  return made.length > 1 ? [...made, h('button', { class: 'chip', onclick: () => go({ filters: new Map() }) }, 'all')] : made;
}

/**
 * @param {Place} place
 * @param {string} id
 * @param {string} answer
 */
function toggle(place, id, answer) {
  const filters = new Map([...place.filters].map(([name, answers]) => [name, new Set(answers)]));
  const answers = filters.get(id) ?? new Set();
  if (!answers.delete(answer)) answers.add(answer);
  if (answers.size) filters.set(id, answers);
  else filters.delete(id);
  go({ filters });
}

/**
 * @param {Row[]} rows
 * @param {Place} place
 * @param {import('./filters.js').Question} question
 */
function card(rows, place, question) {
  const found = sums(rows, place.filters, question);
  const chosen = place.filters.get(question.id);
  if (!found.length || (found.length === 1 && !chosen && ['source', 'node', 'builder', 'model', 'harness', 'version'].includes(question.id))) return null;
  const most = Math.max(...found.map(([, n]) => n), 1);
  const all = found.reduce((sum, [, n]) => sum + n, 0);
  const columns = question.ordered && found.length > 1;
  const bars = Math.min(found.length, columns ? 40 : ANSWERS);
  const buttons = found.slice(0, bars).map(([answer, n]) => {
    const pressed = chosen?.has(answer) ?? false;
    const bar = h('span', { class: 'bar', [columns ? 'height%' : 'width%']: (100 * n) / most });
    return h('button', { class: `answer ${chosen && !pressed ? 'faint' : ''} ${tone(question.id, answer)}`, 'aria-pressed': String(pressed), 'data-focus': `${question.id}:${answer}`,
      title: `${answer}: ${count(n)} ${question.unit}, ${((100 * n) / (all || 1)).toFixed(1)} %${question.id === 'break' && CAUSES[answer] ? `: ${CAUSES[answer]}` : ''}`, onclick: () => toggle(place, question.id, answer) },
    columns ? h('span', { class: 'room' }, bar) : null, said(columns && bars > 8 ? answer.split('–')[0] : answer, 'name'), h('span', { class: 'n' }, count(n)), columns ? null : h('span', { class: 'room' }, bar));
  });
  return h('section', { class: 'card', 'data-question': question.id }, h('h2', {}, question.title, !question.title.toLowerCase().includes(question.unit) && h('span', { class: 'quiet' }, ` ${question.unit}`)),
    h('div', { class: columns ? 'columns' : 'rows' }, ...buttons), found.length > bars && h('p', { class: 'quiet' }, `and ${found.length - bars} more`));
}

/**
 * @param {string} id
 * @param {string} answer
 */
function tone(id, answer) {
  if (id === 'end') return answer === 'passed' ? 'good' : answer === 'not passed' ? '' : answer.includes('truncated') ? 'warn' : 'bad';
  if (id === 'attempt') return answer === 'ok' ? 'good' : 'bad';
  if (id === 'balance') return answer === 'trainable' ? 'good' : 'warn';
  return id === 'break' || id === 'position' ? 'warn' : '';
}

/**
 * @param {Row[]} rows
 * @param {number[]} places
 * @param {Place} place
 */
function tasks(rows, places, place) {
  /** @type {Map<string, number[]>} */
  const groups = new Map();
  for (const at of places) groups.set(rows[at].task, [...(groups.get(rows[at].task) ?? []), at]);
  const list = [...groups].map(([task, members]) => {
    const scored = members.filter((at) => rows[at].reward !== null);
    /** @type {Map<string, (number | null)[]>} */
    const rewards = new Map();
    for (const at of scored) {
      const group = `${rows[at].source}\n${rows[at].group}`;
      rewards.set(group, [...(rewards.get(group) ?? []), rows[at].reward]);
    }
    const flat = [...rewards.values()].filter((each) => each.length > 1 && new Set(each).size === 1).length;
    return { task, members, flat, compared: Math.max(1, rewards.size), rate: scored.length ? scored.filter((at) => passed(rows[at])).length / scored.length : null };
  }).sort((one, other) => (one.rate ?? -1) - (other.rate ?? -1) || one.task.localeCompare(other.task));
  const flat = list.reduce((all, each) => all + each.flat, 0);
  const compared = list.reduce((all, each) => all + each.compared, 0);
  const body = h('tbody', {});
  some(body, list, ({ task, members, flat, compared, rate }) =>
    h('tr', {}, h('td', {}, h('button', { class: 'plain', onclick: () => toggle(place, 'task', task) }, said(task))),
      h('td', { class: 'number' }, rate === null ? '–' : `${Math.round(100 * rate)} %`), h('td', {}, h('span', { class: 'room' }, h('span', { class: 'bar', 'width%': 100 * (rate ?? 0) }))),
      h('td', { class: 'dots' }, ...members.slice(0, 64).map((at) => h('a', { class: `dot ${rows[at].reward === null ? 'none' : passed(rows[at]) ? 'good' : 'bad'}`, href: to({ ...FRESH, e: at }), title: `#${rows[at].sample}: ${rows[at].reward ?? 'no reward'}`, 'aria-label': `sample ${rows[at].sample}, reward ${rows[at].reward}` }))),
      h('td', {}, flat > 0 && h('span', { class: 'flag' }, compared === 1 ? 'no variance' : `no variance in ${flat} of ${compared}`))), 24);
  return h('section', { class: 'card wide' }, h('h2', {}, 'Tasks', h('span', { class: 'quiet' }, ` ${many(compared, 'group')}, the worst first; ${count(flat)} without variance`)),
    h('table', { class: 'tasks' }, h('thead', {}, h('tr', {}, ...['task', 'passed', '', 'samples', ''].map((name) => h('th', {}, name)))), body));
}

/** The stages' colours in the canvas, by the custom properties of the style. */
const colourOf = (/** @type {number} */ stage) => getComputedStyle(document.documentElement).getPropertyValue(`--part${stage}`);

/**
 * Each session is a bar of its stages. Where journals tell when first calls came, bars lie in time, else all begin at 0.
 * @param {Row[]} rows
 * @param {number[]} places
 */
function timeline(rows, places) {
  const timed = places.filter((at) => rows[at].timing.some((each) => each));
  const known = timed.every((at) => rows[at].started !== null);
  /** @param {Row} row */
  const start = (row) => (known ? Number(row.started) - row.timing.slice(0, 3).reduce((/** @type {number} */ sum, each) => sum + (each ?? 0), 0) : 0);
  /** @type {Map<string, number>} */
  const zeros = new Map();  // files may be of runs on different days
  for (const at of timed) zeros.set(rows[at].source, Math.min(zeros.get(rows[at].source) ?? Infinity, start(rows[at])));
  const order = timed.map((at) => ({ at, from: start(rows[at]) - Number(zeros.get(rows[at].source)) })).sort((one, other) => one.from - other.from || one.at - other.at);
  if (!order.length) return null;
  const spans = order.flatMap(({ at, from }, line) => {
    let x = from;
    return rows[at].timing.map((each, stage) => ({ line, stage, x, end: (x += each ?? 0) }));
  });
  const whole = spans.reduce((most, span) => Math.max(most, span.end), 1e-3);
  const high = Math.max(3, Math.min(14, Math.floor(6000 / order.length)));
  const picture = canvas(Math.min(16000, high * order.length), (context, width, height) => {
    for (const { line, stage, x, end } of spans) {
      context.fillStyle = colourOf(stage);
      context.fillRect((x / whole) * width, (line * height) / order.length, Math.max(((end - x) / whole) * width, end > x ? 0.5 : 0), Math.max(1, height / order.length - 1));
    }
  });
  picture.addEventListener('click', (event) => {
    const box = picture.getBoundingClientRect();
    const line = Math.floor(((event.clientY - box.top) / box.height) * order.length);
    if (order[line]) go({ ...FRESH, e: order[line].at });
  });
  return h('section', { class: 'card wide' }, h('h2', {}, 'Stages', h('span', { class: 'quiet' }, ` ${seconds(whole)}, ${known ? `in time${zeros.size > 1 ? ', each file from its start' : ''}` : 'each from its start: the journals that tell when are not here'}`)),
    h('p', { class: 'legend' }, ...STAGES.map((name, stage) => h('span', {}, h('span', { class: `swatch part${stage}` }), name))),
    known && h('figure', {}, busy(spans, whole), h('figcaption', { class: 'quiet' }, `sessions in each stage; ${ran(spans, whole)}`)),
    h('div', { class: 'scroll', tabIndex: 0 }, picture));
}

/**
 * Return the counts of sessions in a stage over time, as steps.
 * @param {{stage: number, x: number, end: number}[]} spans
 * @param {number} stage
 */
function steps(spans, stage) {
  const changes = spans.filter((span) => span.stage === stage && span.end > span.x).flatMap(({ x, end }) => [{ at: x, by: 1 }, { at: end, by: -1 }]);
  changes.sort((one, other) => one.at - other.at || one.by - other.by);
  let n = 0;
  return changes.map(({ at, by }) => ({ at, n: (n += by) }));
}

/**
 * Say how many sessions ran at once, and how busy so many places were.
 * @param {{stage: number, x: number, end: number}[]} spans
 * @param {number} whole
 */
function ran(spans, whole) {
  const running = STAGES.indexOf('running');
  const most = steps(spans, running).reduce((high, { n }) => Math.max(high, n), 0);
  const time = spans.reduce((sum, { stage, x, end }) => sum + (stage === running ? end - x : 0), 0);
  return `at most ${most} ran at once, and ${most} places were busy for ${Math.round((100 * time) / (most * whole || 1))} % of the time`;
}

/**
 * @param {{stage: number, x: number, end: number}[]} spans
 * @param {number} whole
 */
function busy(spans, whole) {
  const stages = STAGES.map((_, stage) => steps(spans, stage)).slice(1);
  const high = stages.flat().reduce((most, { n }) => Math.max(most, n), 1); // more than a call takes as arguments
  return canvas(72, (context, width, height) => {
    context.lineWidth = 1.5;
    stages.forEach((line, stage) => {
      context.strokeStyle = colourOf(stage + 1);
      context.beginPath();
      let y = height - 1;
      context.moveTo(0, y);
      for (const { at, n } of line) {
        context.lineTo((at / whole) * width, y);
        y = height - 1 - (n / high) * (height - 3);
        context.lineTo((at / whole) * width, y);
      }
      context.stroke();
    });
  });
}

/**
 * Return a canvas that is drawn when its width is known.
 * @param {number} height
 * @param {(context: CanvasRenderingContext2D, width: number, height: number) => void} draw
 */
function canvas(height, draw) {
  const element = /** @type {HTMLCanvasElement} */ (h('canvas', { role: 'img', 'aria-label': 'stages over time' }));
  element.style.height = `${height}px`;
  new ResizeObserver(() => {
    const scale = height > 8000 ? 1 : devicePixelRatio;
    const width = element.clientWidth;
    if (!width) return;
    element.width = width * scale;
    element.height = height * scale;
    const context = /** @type {CanvasRenderingContext2D} */ (element.getContext('2d'));
    context.scale(scale, scale);
    draw(context, width, height);
  }).observe(element);
  return element;
}

/** @type {[string, (row: Row) => number | string][]} */
const COLUMNS = [
  ['session', (row) => row.task], ['reward', (row) => row.reward ?? -1], ['ended', ends],
  ['harness', (row) => row.harness], ['calls', (row) => row.calls], ['traces', (row) => Object.values(row.kinds).reduce((sum, n) => sum + n, 0)],
  ['breaks', (row) => row.breaks.length], ['sampled', (row) => row.sampled], ['trainable', (row) => row.trainable], ['seconds', (row) => Number((row.timing[3] ?? 0).toFixed(1))],
];
let sorted = { column: -1, down: true };

/**
 * @param {Row[]} rows
 * @param {number[]} places
 */
function sessions(rows, places) {
  const section = h('section', { class: 'card wide' });
  const draw = () => {
    const by = COLUMNS[sorted.column]?.[1];
    const order = by ? [...places].sort((one, other) => (by(rows[one]) < by(rows[other]) ? -1 : by(rows[one]) > by(rows[other]) ? 1 : 0) * (sorted.down ? -1 : 1)) : places;
    const body = h('tbody', {});
    some(body, order, (at) => h('tr', {}, h('td', {}, h('a', { href: to({ ...FRESH, e: at }) }, ...nameOf(rows[at]))), h('td', {}, rewardMark(rows[at])),
      ...COLUMNS.slice(2).map(([, of]) => { const value = of(rows[at]); return h('td', { class: typeof value === 'number' ? 'number' : '' }, typeof value === 'number' ? count(value) : said(value)); })), 60);
    section.replaceChildren(h('h2', {}, 'Sessions'), h('table', {}, h('thead', {}, h('tr', {}, ...COLUMNS.map(([name], column) =>
      h('th', { class: column > 3 ? 'number' : undefined, 'aria-sort': column === sorted.column ? (sorted.down ? 'descending' : 'ascending') : undefined }, h('button', { class: 'plain', onclick: () => { sorted = { column, down: sorted.column === column ? !sorted.down : true }; draw(); } }, name))))), body));
  };
  draw();
  return section;
}
