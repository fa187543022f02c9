/**
 * Makes elements. Text becomes text nodes: nothing from the data is ever parsed as markup, and no link leaves the page.
 * All text is `visible`.
 */

const SVG = 'http://www.w3.org/2000/svg';

/**
 * @typedef {Node | string | number | null | undefined | false} Child
 */

/**
 * Return an element. Properties are set as such; `class`, `aria-*`, `data-*` and `role` as attributes.
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (/^(title|aria-label)$/.test(name)) element.setAttribute(name, String(value).replace(ODD, nameOf));
    else if (/^(class|role|for|colspan|aria-.*|data-.*)$/.test(name)) element.setAttribute(name, String(value));
    else if (name === 'width%') element.style.width = `${value}%`;
    else if (name === 'left%') element.style.marginLeft = `${value}%`;
    else if (name === 'height%') element.style.height = `${value}%`;
    else /** @type {any} */ (element)[name] = value;
  }
  append(element, children);
  return element;
}

/**
 * @param {Node} parent
 * @param {(Child | Child[])[]} children
 */
export function append(parent, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    for (const node of child instanceof Node ? [child] : visible(String(child))) parent.appendChild(node);
  }
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {...Node} children
 */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** What a reader would not see, or what would change how the rest is read: controls, directions, widths of zero. */
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

/** @param {string} character */
const nameOf = (character) => `U+${Number(character.codePointAt(0)).toString(16).toUpperCase().padStart(4, '0')}`;

/**
 * Return text as nodes; characters that hide are shown by their names.
 * @param {string} text
 * @returns {Node[]}
 */
function visible(text) {
  /** @type {Node[]} */
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(ODD)) {
    if (match.index > from) nodes.push(document.createTextNode(text.slice(from, match.index)));
    const code = match[0].charCodeAt(0);
    nodes.push(h('span', { class: 'odd', title: nameOf(match[0]) }, code < 32 ? `\\x${code.toString(16).padStart(2, '0')}` : nameOf(match[0])));
    from = match.index + match[0].length;
  }
  if (from < text.length) nodes.push(document.createTextNode(text.slice(from)));
  return nodes;
}

/**
 * Return text that stays within itself, whichever direction it is written in.
 * @param {unknown} text
 * @param {string} [name]
 */
export const said = (text, name = '') => h('bdi', name ? { class: name } : {}, String(text ?? ''));

/** @param {string} text */
export const pre = (text) => h('pre', { tabIndex: 0 }, text);

/** @param {number} value */
export const count = (value) => value.toLocaleString('en-US');

/**
 * Return a number of things.
 * @param {number} n
 * @param {string} thing
 */
export const many = (n, thing) => `${count(n)} ${thing}${n === 1 ? '' : 's'}`;

/** @param {number | null | undefined} value */
export const seconds = (value) => (value === null || value === undefined ? '' : value > 0 && value < 0.1 ? `${Math.max(1, Math.round(1000 * value))}\u00a0ms` : `${value.toFixed(value < 10 ? 2 : 1)}\u00a0s`);

/**
 * Show the first items of a list, and a button for the others.
 * @template T
 * @param {HTMLElement} parent
 * @param {T[]} items
 * @param {(item: T) => Node} draw
 * @param {number} [at]
 */
export function some(parent, items, draw, at = 100) {
  parent.append(...items.slice(0, at).map(draw));
  const rest = items.slice(at);
  if (!rest.length) return;
  const more = h('button', { class: 'more', onclick: () => { more.remove(); some(parent, rest, draw, 4 * at); } }, `${count(rest.length)} more`);
  parent.append(more);
}

/**
 * Return what keeps a list in `parent`. `draw` shows items, each with its key first: it makes an element where one is new
 * or something of it has changed, and leaves the others as they are. `more` is a button for those beyond the first ones.
 * @param {HTMLElement} parent
 * @param {(...item: any[]) => HTMLElement} make  Gets an item without its key.
 * @param {number} most
 */
export function list(parent, make, most) {
  /** @type {Map<string, {item: any[], element: HTMLElement}>} */
  let shown = new Map();
  /** @type {any[][]} */
  let all = [];
  const more = h('button', { class: 'more', onclick: () => { most *= 4; draw(all); } });
  /** @param {any[][]} items */
  function draw(items) {
    all = items;
    const before = shown;
    shown = new Map();
    for (const [key, ...item] of items.slice(0, most)) {
      const known = before.get(key);
      const same = known !== undefined && item.every((each, place) => each === known.item[place]);
      shown.set(key, { item, element: same ? known.element : make(...item) });
      if (known && !same) known.element.replaceWith(/** @type {any} */ (shown.get(key)).element);
    }
    for (const [key, { element }] of before) if (!shown.has(key)) element.remove();
    let place = parent.firstElementChild;
    for (const { element } of shown.values()) {
      if (element === place) place = place.nextElementSibling;
      else parent.insertBefore(element, place);
    }
    more.hidden = items.length <= most;
    more.textContent = `${count(items.length - most)} more`;
  }
  return { more, draw };
}
