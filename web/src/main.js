/** Shows the place that the address names, and listens to keys. */

import { Store } from './blocks.js';
import { comparePage } from './compare.js';
import { count, h, said } from './dom.js';
import { episodePage, TABS } from './episode.js';
import { failed, left } from './filters.js';
import { FRESH, go, here } from './place.js';
import { runPage } from './run.js';
import { search } from './search.js';

const store = new Store();
const page = /** @type {HTMLElement} */ (document.getElementById('page'));
const note = h('div', { class: 'note-bar', role: 'status' });
const dialog = /** @type {HTMLDialogElement} */ (h('dialog', {}));
document.body.append(note, dialog);

let shown = '';
let turn = 0;

async function show() {
  const place = here();
  const own = ++turn;
  const wanted = place.e;
  try {
    let next;
    if (wanted === null) next = runPage(store, place);
    else if (!store.rows[wanted]) next = h('main', {}, h('p', { class: 'empty' }, `Episode ${wanted} is not in this page, which has ${store.rows.length}.`));
    else if (place.other !== null && store.rows[place.other]) next = await comparePage(store, wanted, place.other);
    else next = await episodePage(store, place, wanted);
    if (own !== turn) return;
    const key = `${place.e} ${place.other} ${place.tab} ${place.strand}`;
    const scroll = key === shown ? window.scrollY : 0;
    shown = key;
    const focus = /** @type {HTMLElement | null} */ (document.activeElement)?.dataset.focus;
    page.replaceChildren(next);
    if (focus) /** @type {HTMLElement | undefined} */ ([...page.querySelectorAll('[data-focus]')].find((each) => /** @type {HTMLElement} */ (each).dataset.focus === focus))?.focus();
    document.title = wanted === null || !store.rows[wanted] ? 'polar-gym view' : `${store.rows[wanted].task} #${store.rows[wanted].sample}`;
    window.scrollTo(0, scroll);
    document.body.dataset.ready = location.hash || 'run';
    performance.mark('shown');
  } catch (error) {
    page.replaceChildren(h('main', {}, h('p', { class: 'empty bad' }, `This cannot be shown: `, said(error))));
    throw error;
  }
}

/**
 * Go to another episode, the next or previous one that is left by the filters.
 * @param {number} step
 * @param {boolean} [onlyFailed]
 */
function move(step, onlyFailed = false) {
  const place = here();
  const places = left(store.rows, place.filters).filter((at) => !onlyFailed || failed(store.rows[at]));
  const from = place.e ?? (step > 0 ? -1 : store.rows.length);
  const next = step > 0 ? places.find((at) => at > from) : places.findLast((at) => at < from);
  if (next !== undefined) go({ ...FRESH, e: next });
}

/** @param {number} step */
function moveTab(step) {
  const at = TABS.indexOf(here().tab);
  go({ tab: TABS[(at + step + TABS.length) % TABS.length], token: null });
}

/** Compare with the next sample of the same task. */
function compare() {
  const { e, other } = here();
  if (e === null) return;
  const alike = store.rows.map((_, at) => at).filter((at) => at !== e && store.rows[at].task === store.rows[e].task);
  go({ other: alike.find((at) => at > (other ?? -1)) ?? null });
}

/** @type {Record<string, [string, () => void]>} */
const KEYS = {
  j: ['next episode', () => move(1)],
  k: ['previous episode', () => move(-1)],
  n: ['next failure', () => move(1, true)],
  p: ['previous failure', () => move(-1, true)],
  t: ['tokens or conversation', () => go({ tab: here().tab === 'tokens' ? 'conversation' : 'tokens' })],
  f: ['forks', () => go({ tab: 'forks' })],
  '[': ['previous view', () => moveTab(-1)],
  ']': ['next view', () => moveTab(1)],
  c: ['side by side with the next sample of the task', compare],
  u: ['up to the run', () => go({ ...FRESH, e: null })],
  '/': ['search', openSearch],
  '?': ['keys', openHelp],
};

document.addEventListener('keydown', (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return;
  const found = Object.hasOwn(KEYS, event.key) ? KEYS[event.key] : undefined;
  if (!found || dialog.open) return;
  event.preventDefault();
  found[1]();
});

function openHelp() {
  dialog.replaceChildren(h('h2', {}, 'Keys'), h('dl', { class: 'facts' }, ...Object.entries(KEYS).flatMap(([key, [does]]) => [h('dt', {}, h('kbd', {}, key)), h('dd', {}, does)])),
    h('p', { class: 'quiet' }, 'A search for id:12,13 finds these token ids. Every view has an address of its own.'), h('form', { method: 'dialog' }, h('button', {}, 'close')));
  dialog.showModal();
}

let asked = 0;

function openSearch() {
  const input = /** @type {HTMLInputElement} */ (h('input', { type: 'search', 'aria-label': 'search', placeholder: 'text, or id:12,13', size: 50 }));
  const results = h('ol', { class: 'results', 'aria-live': 'polite' });
  const state = h('p', { class: 'quiet' });
  const form = h('form', { onsubmit: async (/** @type {Event} */ event) => {
    event.preventDefault();
    const own = ++asked;
    const places = left(store.rows, here().filters);
    const { e } = here();
    if (e !== null) places.sort((one, other) => Number(other === e) - Number(one === e));
    let read = 0;
    results.replaceChildren();
    for await (const found of search(store, places, input.value.trim())) {
      if (own !== asked || !dialog.open) return;
      if (!found) state.textContent = `${results.children.length} found in ${count(++read)} of ${count(places.length)} episodes`;
      else results.append(h('li', {}, h('a', { href: found.href, onclick: () => dialog.close() }, said(store.rows[found.place].task), ` #${store.rows[found.place].sample} `), h('span', { class: 'quiet' }, said(found.words))));
    }
  } }, input, h('button', {}, 'search'));
  dialog.replaceChildren(form, state, results);
  dialog.showModal();
  input.focus();
}

addEventListener('hashchange', show);

if (document.body.dataset.follow === undefined) {
  await store.open();
  await show();
} else {
  let late = 0;
  let took = 0;
  let state = 'following';
  store.follow((problem) => {
    note.textContent = state = problem || state;
    if (!late && here().e === null) late = setTimeout(() => {
      late = 0;
      const begun = performance.now();
      if (here().e === null) show();
      took = performance.now() - begun;
    }, 100 + 4 * took);
    else if (here().e !== null && document.body.dataset.ready === undefined) show();
  }).then(() => { note.textContent = state === 'following' ? 'the server has ended' : state; }, (error) => { note.textContent = `not following: ${error.message}`; });
}
document.body.dataset.loaded = 'yes';
