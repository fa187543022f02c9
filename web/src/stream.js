/** Reads JSON lines from the page's own server as they come. */

/** An answer of the server that is no stream. */
export class Refused extends Error {
  /** @param {Response} response */
  constructor(response) {
    super(`the server answered ${response.status}`);
    this.status = response.status;
  }
}

/**
 * Yield the objects of the lines that came together. Throws `Refused`.
 * @param {string} path
 * @param {Record<string, string>} [headers]
 * @returns {AsyncGenerator<any[]>}
 */
export async function* told(path, headers = {}) {
  const response = await fetch(path, { cache: 'no-store', headers });
  if (!response.ok || !response.body) throw new Refused(response);
  let rest = '';
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = /** @type {string} */ (lines.pop());
    if (lines.length) yield lines.map((line) => JSON.parse(line));
  }
}

/** @param {unknown} value */
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);

/**
 * Return the value that a JSON merge patch (RFC 7386) makes. What the patch does not name stays the same object.
 * @param {any} value
 * @param {any} patch
 */
export function merged(value, patch) {
  if (!isObject(patch)) return patch;
  const next = Object.assign(Object.create(null), isObject(value) ? value : {});
  for (const [name, change] of Object.entries(patch)) {
    if (change === null) delete next[name];
    else next[name] = merged(next[name], change);
  }
  return next;
}
