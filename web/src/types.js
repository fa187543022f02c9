/**
 * What the page is told; `polar_gym.view.summary` and `polar_gym.view.blocks` write it.
 *
 * @typedef {Record<string, any>} Message  A chat message in OpenAI's form.
 *
 * @typedef {object} Row  What the run page knows of an episode.
 * @property {string} source
 * @property {string} session
 * @property {number} attempt
 * @property {string} task
 * @property {string} group  The sessions that an advantage compares with this one.
 * @property {number} sample
 * @property {string} harness
 * @property {string} model
 * @property {boolean} scripted
 * @property {string} builder
 * @property {string | null} branched  The session that sampled the beginning.
 * @property {number} shared  Tokens of that beginning.
 * @property {string} status
 * @property {string | null} truncated
 * @property {{stage: string, kind: string, message: string} | null} failure
 * @property {number | null} reward
 * @property {boolean | null} resolved
 * @property {string | null} node
 * @property {string | null} version
 * @property {number | null} staleness
 * @property {(number | null)[]} timing  Seconds of each of `STAGES`.
 * @property {number | null} started  When the first call came, Unix time.
 * @property {number} calls
 * @property {Record<string, number>} kinds
 * @property {number} sampled
 * @property {number} trainable
 * @property {Record<string, number>} excluded
 * @property {Record<string, number>} unsent
 * @property {number} spliced
 * @property {number} canonical
 * @property {[string, number | null][]} breaks
 * @property {[string, string, number][]} tools
 * @property {number[]} latency
 * @property {number} prefill
 * @property {number | null} prompt
 * @property {number} tokens
 * @property {boolean} annotated
 * @property {string | null} tokenizer
 * @property {boolean} variant  Whether it is another episode again, with the traces of another builder.
 *
 * @typedef {object} Call  A recorded call; without a journal, what the traces tell of it.
 * @property {string} call_id
 * @property {number} index
 * @property {string | null} parent_id
 * @property {string} continuation
 * @property {string | null} splice_cause
 * @property {string} outcome
 * @property {string | null} finish_reason
 * @property {number | null} started_at
 * @property {number | null} duration
 * @property {string | null} error
 * @property {string | null} error_kind
 * @property {string[]} sampling_mismatch
 * @property {Record<string, string>} hints
 * @property {string | null} frozen
 * @property {{session_id: string, owned: boolean, differences: {only_volatile: boolean}[]} | null} replayed  How it was answered from a record.
 * @property {number} prompt
 * @property {number} sampled
 * @property {string | null} excluded
 *
 * @typedef {object} Version
 * @property {string} version
 * @property {number} start
 * @property {number} end
 * @property {boolean} estimated
 * @property {boolean} older_cache
 *
 * @typedef {object} Strand  A trace, or a call that is in none. All arrays are as long as the tokens.
 * @property {string} id
 * @property {string} kind
 * @property {boolean} trace
 * @property {number} prompt
 * @property {string | null} finish
 * @property {[string, number, number][]} turns  Call, first token, end.
 * @property {Version[]} versions
 * @property {Message[]} messages
 * @property {Message[]} tools
 * @property {Int32Array} ids
 * @property {Uint8Array} mask
 * @property {Float32Array} logprobs
 * @property {Int32Array | null} kept
 * @property {Record<string, Float32Array>} values
 *
 * @typedef {object} Break
 * @property {string} call_id
 * @property {string | null} parent_id
 * @property {number | null} position
 * @property {string} cause
 *
 * @typedef {object} Episode
 * @property {any} request
 * @property {any} engine
 * @property {any} evaluation
 * @property {any} artifacts
 * @property {any} fidelity
 * @property {{call_id: string, status: string, name: string | null}[]} attempts
 * @property {Strand[]} strands
 * @property {Call[]} calls
 * @property {boolean} recorded  Whether the journal was there: `calls` then has all calls.
 * @property {Message[]} messages
 */

export const STAGES = ['queued', 'init', 'ready', 'running', 'building', 'evaluating'];

/** @type {Record<string, string>} Why a call does not go on with the tokens of the call before; see `polar_gym.splicing`. */
export const CAUSES = {
  history: 'the harness changed what came before the answer that it continues',
  tools: 'the harness offers other tools than before',
  partial_turn: 'the answer came back without some of its tool calls or their results',
  ambiguous: 'several calls gave the answer that the harness sent back',
  unknown_turn: 'no call gave the answer that the harness sent back',
  off: 'splicing was off, and the engine’s template gave other tokens',
  engine: 'the engine made other tokens of the prompt that it was given',
  cut: 'the answer before was cut inside reasoning or a tool call',
  multimodal: 'the conversation has an image',
  template: 'the chat template rewrites turns of the past',
  suffix: 'the new messages do not read the same as tokens',
};
