/** A git patch with colours: those of the change, and those of the language, as far as most languages agree. */

import { h } from './dom.js';

const WORDS = 'and|as|assert|async|await|break|case|catch|class|const|continue|def|del|do|elif|else|enum|except|export|extends|finally|fn|for|from|func|function|global|go|if|impl|import|in|interface|is|lambda|let|match|mut|new|not|or|package|pass|private|pub|public|raise|return|self|static|struct|super|switch|this|throw|try|type|use|var|while|with|yield|None|True|False|null|true|false|nil';
const SYNTAX = new RegExp(`(?<comment>(?:^|\\s)(?:#|//).*$)|(?<string>"(?:[^"\\\\]|\\\\.)*"|'(?:[^'\\\\]|\\\\.)*'|\`[^\`]*\`)|(?<number>\\b\\d[\\w.]*)|(?<word>\\b(?:${WORDS})\\b)`, 'g');

/** @param {string} line */
function coloured(line) {
  /** @type {(Node | string)[]} */
  const parts = [];
  let from = 0;
  for (const match of line.matchAll(SYNTAX)) {
    const [kind] = Object.entries(match.groups ?? {}).find(([, value]) => value !== undefined) ?? [''];
    parts.push(line.slice(from, match.index), h('span', { class: `s-${kind}` }, match[0]));
    from = match.index + match[0].length;
  }
  return [...parts, line.slice(from)];
}

/** @param {string} text */
export function patch(text) {
  const whole = h('div', { class: 'patch', tabIndex: 0 });
  for (const line of text.split('\n')) {
    const head = /^(diff |index |--- |\+\+\+ |new file|deleted file|similarity|rename )/.test(line);
    const name = head ? 'file' : line.startsWith('@@') ? 'hunk' : line.startsWith('+') ? 'added' : line.startsWith('-') ? 'removed' : '';
    whole.append(h('div', { class: name }, head || name === 'hunk' ? line : [line.slice(0, 1), ...coloured(line.slice(1))]));
  }
  return whole;
}
