/** The page of one episode. */

import { conversation } from './conversation.js';
import { append, count, h, many, pre, said, seconds } from './dom.js';
import { passed } from './filters.js';
import { patch } from './patch.js';
import { FRESH, go, here, to } from './place.js';
import { around, scale, tokens, turnOf } from './tokens.js';
import { CAUSES, STAGES } from './types.js';

/** @import {Call, Episode, Row, Strand} from './types.js' */
/** @import {Store} from './blocks.js' */
/** @import {Place} from './place.js' */

export const TABS = ['conversation', 'tokens', 'forks', 'diff', 'tests', 'output', 'facts'];

/** @param {Row} row */
export const rewardMark = (row) =>
  h('span', { class: `reward ${row.reward === null ? 'none' : passed(row) ? 'good' : 'bad'}` }, row.reward === null ? 'no reward' : String(Number(row.reward.toFixed(4))));

/** @param {Strand} strand */
export const trainedOf = (strand) => `${count(strand.mask.reduce((sum, each) => sum + each, 0))} trained of ${count(strand.ids.length)}`;

/** @param {Row} row */
export const nameOf = (row) => [said(row.task), ` #${row.sample}`, row.attempt > 0 && ` attempt ${row.attempt}`];

/**
 * @param {Store} store
 * @param {Place} place
 * @param {number} e
 */
export async function episodePage(store, place, e) {
  const row = store.rows[e];
  const episode = await store.episode(e);
  const strand = episode.strands[place.strand] ?? episode.strands[0];
  const page = h('main', { class: 'episode' });
  page.append(header(store, row, e, place), side(episode, place));
  const body = h('div', { class: 'body', id: 'body', tabIndex: -1 });
  const tabs = h('nav', { class: 'tabs', 'aria-label': 'views of the episode' },
    ...TABS.map((name) => h('a', { href: to({ tab: name, token: null }), 'aria-current': name === place.tab ? 'page' : undefined }, label(name, episode))));
  body.append(tabs);
  if (row.failure) body.append(h('p', { class: 'bad' }, said(row.failure.kind), ' while ', row.failure.stage, ': ', said(row.failure.message)));
  const settings = episode.artifacts.project_settings;
  if (settings.length) body.append(h('p', {}, h('span', { class: 'flag' }, 'settings of the repository'), ' ', said(settings.join(', '))));
  body.append(content(store, row, episode, strand, place));
  page.append(body);
  return page;
}

/**
 * @param {string} name
 * @param {Episode} episode
 */
function label(name, episode) {
  if (name === 'forks') return `forks ${episode.fidelity.breaks.length || ''}`;
  if (name === 'tests') return `tests ${Object.keys(episode.evaluation?.tests ?? {}).length || ''}`;
  return name;
}

/**
 * @param {Store} store
 * @param {Row} row
 * @param {number} e
 * @param {Place} place
 */
function header(store, row, e, place) {
  const rows = store.rows;
  const alike = rows.map((other, at) => ({ other, at })).filter(({ other, at }) => at !== e && (other.task === row.task || other.session === row.session));
  const from = rows.findIndex((other) => other.session === row.branched && other.builder === row.builder);
  const select = /** @type {HTMLSelectElement} */ (h('select', { 'aria-label': 'compare with', onchange: () => go({ other: Number(select.value) }) },
    h('option', { value: '', selected: place.other === null }, 'compare with …'),
    ...alike.map(({ other, at }) => h('option', { value: String(at), selected: place.other === at },
      `${relation(row, other)} · ${other.reward ?? 'no reward'} · ${other.source}`))));
  return h('header', { class: 'head' },
    h('a', { href: to({ ...FRESH, e: null }) }, '← run'),
    h('h1', {}, ...nameOf(row)), rewardMark(row),
    h('span', { class: 'quiet' }, said(row.harness), ' · ', said(row.model), row.scripted && ' (scripted)', ' · ', said(row.builder), ' · ', row.status.toLowerCase()),
    row.branched && h('a', { class: 'flag', href: from < 0 ? undefined : to({ other: from }) }, 'branched from ', said(row.branched)),
    row.truncated && h('span', { class: 'flag' }, `truncated by ${row.truncated}`),
    row.failure && h('span', { class: 'flag bad' }, said(row.failure.kind)),
    h('span', { class: 'grow' }), alike.length > 0 && select,
    h('span', { class: 'together' },
      h('a', { href: e > 0 ? to({ ...FRESH, e: e - 1 }) : undefined, title: 'k' }, 'previous'),
      h('span', { class: 'quiet' }, `${e + 1} of ${rows.length}`),
      h('a', { href: e + 1 < rows.length ? to({ ...FRESH, e: e + 1 }) : undefined, title: 'j' }, 'next')));
}

/**
 * What another episode is to this one.
 * @param {Row} row
 * @param {Row} other
 */
function relation(row, other) {
  if (other.session === row.session) return `same session, ${other.builder}`;
  if (other.session === row.branched) return `#${other.sample}, which this is branched from`;
  return other.branched === row.session ? `#${other.sample}, a branch of this` : `#${other.sample}`;
}

/**
 * The tree of the session: strands, and the calls of each.
 * @param {Episode} episode
 * @param {Place} place
 */
function side(episode, place) {
  const side = h('aside', { 'aria-label': 'calls of the session' });
  const calls = new Map(episode.calls.map((call) => [call.call_id, call]));
  const breaks = new Map(episode.fidelity.breaks.map((/** @type {any} */ each) => [each.call_id, each]));
  const owners = strandsOf(episode);
  /** @type {Set<string>} */
  const told = new Set();
  /** @param {number} at  The first call that is the strand's own. */
  const first = (at) => Math.min(...episode.strands[at].turns.filter(([id]) => owners.get(id) === at).map(([id]) => /** @type {Call} */ (calls.get(id)).index));
  for (const at of [...episode.strands.keys()].sort((one, other) => first(one) - first(other))) {
    const strand = episode.strands[at];
    const depth = depthOf(episode, owners, calls, at);
    const reason = calls.get(strand.turns[0]?.[0])?.excluded;
    const title = h('a', { class: 'strand', href: to({ strand: at, call: null, token: null }), 'aria-current': at === place.strand ? 'true' : undefined },
      h('b', {}, strand.kind), strand.trace ? ` ${trainedOf(strand)}` : ` excluded: ${reason ?? calls.get(strand.turns[0]?.[0])?.outcome}`);
    const list = h('ol', {});
    const context = strand.turns.filter(([id]) => told.has(id)).map(([id]) => calls.get(id)?.index);
    if (context.length) list.append(h('li', { class: 'again' }, `after ${context.length > 1 ? `calls ${context[0]} to ${context.at(-1)}` : `call ${context[0]}`}`));
    for (const [id, start, end] of strand.turns) {
      if (told.has(id)) continue;
      list.append(callItem(/** @type {Call} */ (calls.get(id)), at, place, breaks.get(id), end - start, strand.trace));
      told.add(id);
    }
    side.append(h('section', { class: `strandbox depth${Math.min(depth, 3)} ${strand.trace ? '' : 'excluded'}` }, title, list));
  }
  const lost = episode.calls.filter((call) => !told.has(call.call_id));
  if (lost.length) side.append(h('section', { class: 'strandbox excluded' }, h('b', {}, 'without tokens'), h('ol', {}, ...lost.map((call) => callItem(call, -1, place, undefined, 0, true)))));
  if (!episode.recorded && Object.keys(episode.fidelity.excluded).length)
    side.append(h('p', { class: 'quiet' }, 'The journal is not here: excluded calls are counted, not shown.'));
  return side;
}

/**
 * @param {Call} call
 * @param {number} strand
 * @param {Place} place
 * @param {any} broken
 * @param {number} sampled
 * @param {boolean} reason  Whether to say why it is excluded.
 */
function callItem(call, strand, place, broken, sampled, reason) {
  const cause = broken?.cause;
  const notes = [
    reason && call.excluded && `excluded: ${call.excluded}`, call.outcome !== 'delivered' && call.outcome !== call.excluded && call.outcome,
    call.replayed && replay(call.replayed), call.frozen && `frozen: ${call.frozen}`, call.sampling_mismatch.join(', '), cause && `fork: ${cause}`, call.error_kind,
  ].filter((note, at, all) => note && all.indexOf(note) === at);
  return h('li', {},
    h('a', { href: to({ ...(strand < 0 ? {} : { strand }), call: call.call_id, token: null }), 'aria-current': place.call === call.call_id ? 'true' : undefined, title: call.call_id },
      `${call.index} `, h('span', { class: 'quiet' }, `${call.continuation} · ${count(sampled)} sampled${call.duration === null ? '' : ` · ${seconds(call.duration)}`}`),
      notes.length > 0 && h('span', { class: 'note' }, said(notes.join(' · '))),
      call.error && h('span', { class: 'note bad' }, said(call.error))));
}

/** @param {NonNullable<Call['replayed']>} replayed */
function replay({ owned, session_id, differences }) {
  const changed = differences.filter((each) => !each.only_volatile).length;
  return `${owned ? 'from an earlier attempt' : `from ${session_id}`}${changed ? `, ${many(changed, 'tool result')} changed` : ''}`;
}

/** @param {Episode} episode @returns {Map<string, number>} */
function strandsOf(episode) {
  /** @type {Map<string, number>} */
  const owners = new Map();
  episode.strands.forEach((strand, at) => {
    for (const [call, start] of strand.turns) if (!owners.has(call) || strand.mask[start]) owners.set(call, at);
  });
  return owners;
}

/**
 * @param {Episode} episode
 * @param {Map<string, number>} owners
 * @param {Map<string, Call>} calls
 * @param {number} at
 */
function depthOf(episode, owners, calls, at) {
  let depth = 0;
  for (const seen = new Set([at]); ; depth++) {
    const own = episode.strands[at].turns.find(([id]) => owners.get(id) === at) ?? episode.strands[at].turns[0];
    const parent = own && calls.get(own[0])?.parent_id;
    const next = parent ? owners.get(parent) : undefined;
    if (next === undefined || seen.has(next)) return depth;
    seen.add((at = next));
  }
}

/**
 * @param {Store} store
 * @param {Row} row
 * @param {Episode} episode
 * @param {Strand | undefined} strand
 * @param {Place} place
 */
function content(store, row, episode, strand, place) {
  if (place.tab === 'diff') return diffTab(episode);
  if (place.tab === 'tests') return testsTab(episode);
  if (place.tab === 'output') return outputTab(episode);
  if (place.tab === 'facts') return factsTab(row, episode);
  if (place.tab === 'forks') return forksTab(episode, store.texts(row));
  if (!strand) return h('p', { class: 'empty' }, 'No call of this session has tokens.');
  if (place.tab === 'tokens') return tokensTab(episode, strand, store.texts(row), place);
  const said = conversation(strand, (call) => to({ tab: 'tokens', call, token: null }));
  if (place.call) {
    const box = [...said.children].find((each) => /** @type {HTMLElement} */ (each).dataset.call === place.call);
    box?.classList.add('marked');
    requestAnimationFrame(() => box?.scrollIntoView({ block: 'start' }));
  }
  return said;
}

/**
 * @param {Episode} episode
 * @param {Strand} strand
 * @param {(id: number) => string} text
 * @param {Place} place
 */
function tokensTab(episode, strand, text, place) {
  const choices = ['logprob', 'mask', ...(strand.kept ? ['kept'] : []), ...Object.keys(strand.values)];
  const begin = strand.turns.find(([call]) => call === place.call)?.[1] ?? null;
  const marked = place.token ?? begin;
  const versions = [...new Set(strand.versions.map((each) => each.version))];
  const bar = h('div', { class: 'tools' },
    ...choices.map((name) => h('a', { class: 'choice', href: to({ colour: name }), 'aria-current': name === place.colour ? 'true' : undefined }, name)),
    place.colour === 'logprob' && h('span', { class: 'legend' }, 'likely ', ...[0, 1, 2, 3, 4, 5, 6, 7].map((n) => h('span', { class: `t on h${n}` }, '\u00a0\u00a0')), ' unlikely'),
    Object.hasOwn(strand.values, place.colour) && scale(strand.values[place.colour]),
    versions.length > 0 && h('span', { class: 'legend' }, 'weights ', ...versions.map((version, at) => h('span', { class: `t v${at % 4}` }, said(version)))));
  const detail = h('dl', { class: 'detail', 'aria-live': 'polite' });
  if (marked !== null && marked < strand.ids.length) append(detail, describe(episode, strand, marked, text));
  else detail.append(h('dd', { class: 'quiet' }, 'Click a token, or follow a link, to see all that is known of it. Grey: not trained.'));
  return h('div', {}, h('div', { class: 'sticky' }, bar, detail), tokens(strand, text, place.colour, marked, (at) => go({ token: at })));
}

/**
 * Return why a token is trained, or is not.
 * @param {Episode} episode
 * @param {Strand} strand
 * @param {number} at
 * @param {Call | undefined} call  The one that sampled it.
 */
function loss(episode, strand, at, call) {
  if (strand.mask[at]) return 'trained';
  if (!call) return 'not sampled, so not trained';
  if (call.excluded) return `not trained, excluded: ${call.excluded}`;
  const elsewhere = episode.strands.some((other) => other.ids[at] === strand.ids[at] && other.mask[at] && other.turns.some(([id]) => id === call.call_id));
  return elsewhere ? 'trained in another trace' : 'sampled, not trained';
}

/**
 * @param {Episode} episode
 * @param {Strand} strand
 * @param {number} at
 * @param {(id: number) => string} text
 */
function describe(episode, strand, at, text) {
  const turn = turnOf(strand, at);
  const call = turn && episode.calls.find((each) => each.call_id === turn[0]);
  const version = strand.versions.find((each) => at >= each.start && at < each.end);
  const logprob = turn && (strand.mask[at] || strand.logprobs[at]) ? strand.logprobs[at] : null;
  /** @type {[string, unknown][]} */
  const facts = [
    ['position', at], ['id', strand.ids[at]], ['text', JSON.stringify(text(strand.ids[at]))],
    ['loss', loss(episode, strand, at, call)],
    ['logprob', logprob === null ? '' : `${logprob.toPrecision(3)} (p ${Math.exp(logprob).toPrecision(3)})`],
    ['call', turn ? `${call?.index ?? turn[0]}, token ${at - turn[1]} of ${turn[2] - turn[1]}` : ''],
    ['weights', version ? `${version.version}${version.estimated ? ' (estimated)' : ''}${version.older_cache ? ', older cache' : ''}` : ''],
    ['drawn from', strand.kept?.[at] ? `${strand.kept[at]} tokens` : ''],
    ...Object.entries(strand.values).map(([name, values]) => /** @type {[string, unknown]} */ ([name, Number.isFinite(values[at]) ? values[at].toPrecision(5) : ''])),
  ];
  return facts.filter(([, value]) => value !== '').flatMap(([name, value]) => [h('dt', {}, said(name)), h('dd', {}, said(value))]);
}

/**
 * Return the traces that continue a call which an earlier trace continues, too, without a break.
 * @param {Episode} episode
 */
function second(episode) {
  /** @type {Map<string, number>} */
  const seen = new Map();
  /** @type {{ place: number, after: string, other: number }[]} */
  const found = [];
  episode.strands.forEach((strand, place) => {
    const ids = strand.turns.map(([id]) => id);
    const fresh = ids.find((id) => !seen.has(id));
    const after = ids.filter((id) => seen.has(id)).at(-1);
    if (fresh && after && !episode.fidelity.breaks.some((/** @type {any} */ broken) => broken.call_id === fresh)) found.push({ place, after, other: seen.get(after) ?? 0 });
    ids.forEach((id) => seen.has(id) || seen.set(id, place));
  });
  return found;
}

/**
 * @param {Episode} episode
 * @param {(id: number) => string} text
 */
function forksTab(episode, text) {
  const calls = new Map(episode.calls.map((call) => [call.call_id, call]));
  const branches = second(episode).map(({ place, after, other }) => h('section', { class: 'card' }, h('h2', {}, 'fork: another continuation'),
    h('p', {}, h('a', { href: to({ tab: 'tokens', strand: place, token: 0, call: null }) }, `trace ${place}`),
      ' (', said(episode.strands[place].kind), `) goes on from call ${calls.get(after)?.index ?? after}, as trace ${other} does: the harness continued that call twice. No token prefix broke.`)));
  if (!episode.fidelity.breaks.length && !branches.length) return h('p', { class: 'empty' }, 'Every continuation held: no token prefix broke.');
  return h('div', {}, ...branches, ...episode.fidelity.breaks.map((/** @type {any} */ broken) => {
    const call = calls.get(broken.call_id);
    /** @param {string | null} id */
    const at = (id) => episode.strands.findIndex((strand) => strand.turns.some(([turn]) => turn === id));
    const [before, after] = [at(broken.parent_id), at(broken.call_id)];
    const box = h('section', { class: 'card' }, h('h2', {}, 'fork: ', said(broken.cause), CAUSES[broken.cause] && h('span', { class: 'quiet' }, ` ${CAUSES[broken.cause]}`)),
      h('p', {}, `call ${call?.index ?? ''} does not continue `, broken.parent_id ? `call ${calls.get(broken.parent_id)?.index ?? broken.parent_id}` : 'any call that it names',
        broken.position === null ? '' : `: the first difference is at position ${count(broken.position)}`));
    if (broken.position === null) return box;
    for (const [title, place, id] of /** @type {[string, number, string][]} */ ([['before', before, broken.parent_id], ['after', after, broken.call_id]])) {
      if (place < 0) continue;
      const strand = episode.strands[place];
      const turn = /** @type {[string, number, number]} */ (strand.turns.find(([each]) => each === id));
      const end = title === 'before' ? turn[2] : turn[1];
      box.append(h('h3', {}, h('a', { href: to({ tab: 'tokens', strand: place, token: Math.min(broken.position, end - 1), call: null }) }, title)), around(strand, broken.position, text, end));
    }
    return box;
  }));
}

/** @param {Episode} episode */
function diffTab(episode) {
  const { diff, not_carried } = episode.artifacts;
  return h('div', {}, diff ? patch(diff) : h('p', { class: 'empty' }, 'The agent changed nothing.'),
    not_carried.length > 0 && h('section', { class: 'card' }, h('h2', {}, 'Not in the diff, not graded'), pre(not_carried.join('\n'))));
}

/** @param {Episode} episode */
function testsTab(episode) {
  const result = episode.evaluation;
  if (!result) return h('p', { class: 'empty' }, 'The session was not graded.');
  const tests = Object.entries(result.tests).sort(([, one], [, other]) => Number(one === 'PASSED') - Number(other === 'PASSED'));
  return h('div', {}, h('section', { class: 'card' }, h('h2', {}, said(result.evaluator), `: ${result.reward}`), h('p', {}, said(result.detail)),
    h('p', { class: 'quiet' }, said([...Object.entries(result.components).map(([name, value]) => `${name} ${value}`), result.trust && `trust ${result.trust}`].filter(Boolean).join(' · ')))),
  h('table', { class: 'tests' }, h('tbody', {}, ...tests.map(([name, outcome]) => h('tr', {}, h('td', { class: outcome === 'PASSED' ? 'good' : outcome === 'SKIPPED' ? '' : 'bad' }, said(outcome)), h('td', {}, said(name)))))),
  result.log && h('section', { class: 'card' }, h('h2', {}, 'Grader’s output'), pre(result.log)));
}

/** @param {Record<string, unknown>} values */
const pairs = (values) => Object.entries(values).map(([name, value]) => `${name} ${typeof value === 'string' ? value : JSON.stringify(value)}`).join(', ');

/** @param {Episode} episode */
function outputTab(episode) {
  const parts = [['final message', episode.artifacts.final_message], ['stdout', episode.artifacts.stdout], ['stderr', episode.artifacts.stderr]];
  return h('div', {}, ...parts.map(([name, text]) => h('section', { class: 'card' }, h('h2', {}, name), text ? pre(text) : h('p', { class: 'quiet' }, 'nothing'))));
}

/**
 * @param {Row} row
 * @param {Episode} episode
 */
function factsTab(row, episode) {
  const excluded = Object.entries(row.excluded);
  const sum = row.trainable + excluded.reduce((all, [, n]) => all + n, 0);
  const request = episode.request;
  /** @type {[string, unknown][]} */
  const facts = [
    ['session', row.session], ['node', row.node ?? 'unknown'], ['weights at the start', row.version ?? 'never set'], ['staleness', row.staleness ?? 'unknown'],
    ['engine', `${episode.engine.name}, ${episode.engine.model}`], ['logprobs', episode.engine.logprobs_mode ?? 'unknown'],
    ['sampling', pairs(request.sampling)], ['runtime', `${request.runtime.name} ${request.runtime.image ?? ''}`], ['evaluator', request.evaluator.name],
    ['metadata', pairs(request.metadata) || 'none'],
  ];
  return h('div', {},
    h('section', { class: 'card' }, h('h2', {}, 'Balance of tokens'),
      h('p', {}, `${count(row.sampled)} sampled ${sum === row.sampled ? '=' : '≠'} ${count(row.trainable)} trainable`, ...excluded.map(([reason, n]) => ` + ${count(n)} ${reason}`),
        ...Object.entries(row.unsent).map(([outcome, n]) => `; ${count(n)} more were never sent (${outcome})`)),
      balanceBar([['trainable', row.trainable], ...excluded], [5, 1, 2, 6, 7, 0, 4, 3])),
    h('section', { class: 'card' }, h('h2', {}, 'Timing'), timingBar(row)),
    callTimes(episode),
    h('section', { class: 'card' }, h('h2', {}, 'Settings'), h('dl', { class: 'facts' }, ...facts.flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, said(value))]))),
    h('section', { class: 'card' }, h('h2', {}, 'Instruction'), pre(request.instruction)));
}

/**
 * @param {[string, number][]} parts
 * @param {number[]} [colours]
 */
export function balanceBar(parts, colours = [0, 1, 2, 3, 4, 5, 6, 7]) {
  const whole = parts.reduce((sum, [, n]) => sum + n, 0) || 1;
  return h('div', { class: 'stack', role: 'img', 'aria-label': parts.map(([name, n]) => `${name} ${n}`).join(', ') },
    ...parts.filter(([, n]) => n).map(([name, n], at) => h('span', { class: `part${colours[at % 8]}`, 'width%': (100 * n) / whole, title: `${name}: ${n}` }, n > whole / 12 && name)));
}

/** @param {Row} row */
function timingBar(row) {
  const parts = STAGES.map((name, at) => /** @type {[string, number]} */ ([`${name} ${seconds(row.timing[at])}`, row.timing[at] ?? 0]));
  return h('div', {}, balanceBar(parts), h('p', { class: 'quiet' }, parts.map(([name]) => name).join(' · ')));
}

/** @param {Episode} episode */
function callTimes(episode) {
  const timed = episode.calls.filter((call) => call.started_at !== null);
  if (!timed.length) return null;
  const start = Math.min(...timed.map((call) => Number(call.started_at)));
  const whole = Math.max(...timed.map((call) => Number(call.started_at) + Number(call.duration) - start), 1e-3);
  return h('section', { class: 'card' }, h('h2', {}, `Calls over ${seconds(whole)}`), h('div', { class: 'calls' }, ...timed.flatMap((call) => [
    h('a', { href: to({ tab: 'conversation', call: call.call_id, strand: Math.max(0, episode.strands.findIndex((strand) => strand.turns.some(([id]) => id === call.call_id))) }) }, String(call.index)),
    h('span', { class: call.excluded ? 'warn' : '', title: `${seconds(call.duration)}${call.excluded ? `, excluded: ${call.excluded}` : ''}` },
      h('span', { class: 'bar', 'left%': (100 * (Number(call.started_at) - start)) / whole, 'width%': Math.max(0.2, (100 * Number(call.duration)) / whole) }))])));
}
