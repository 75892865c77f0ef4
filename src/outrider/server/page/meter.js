/** The figures of one answer, from its rounds and from the usage at its end. */

const TIMED_MS = 50;

export class Meter {
  constructor() {
    this.started = performance.now();
    this.ended = null;
    this.first = null; // when the first tokens came, and how many they were
    this.last = null;
    this.tokens = 0;
    this.rounds = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.history = []; // [drafted, accepted] of the last rounds
    this.usage = null;
  }

  add(round) {
    this.last = performance.now();
    this.first ??= { time: this.last, tokens: round.count };
    this.tokens += round.count;
    this.rounds += 1;
    this.drafted += round.drafted;
    this.accepted += round.accepted;
    this.history.push([round.drafted, round.accepted]);
    if (this.history.length > 64) this.history.shift();
  }

  close(usage) {
    this.ended ??= performance.now();
    if (!usage) return;
    this.usage = usage;
    this.tokens = usage.completion_tokens ?? this.tokens;
  }

  get seconds() {
    return ((this.ended ?? performance.now()) - this.started) / 1000;
  }

  get secondsToFirst() {
    return this.first ? (this.first.time - this.started) / 1000 : null;
  }

  /** Whether the rounds after the first took long enough to be timed: they may also arrive in one piece. */
  get isTimed() {
    return this.first !== null && this.last - this.first.time >= TIMED_MS;
  }

  /** After the first round, which belongs to reading the prompt; of a very short answer over its whole time. */
  get tokensPerSecond() {
    if (!this.first) return null;
    if (this.isTimed) return ((this.tokens - this.first.tokens) * 1000) / (this.last - this.first.time);
    return (this.tokens * 1000) / Math.max(this.last - this.started, 1);
  }

  get acceptance() {
    return this.drafted ? this.accepted / this.drafted : null;
  }

  get tokensPerRound() {
    return this.usage?.speculation?.tokens_per_round ?? (this.rounds ? this.tokens / this.rounds : null);
  }

  get measuredSpeedup() {
    return this.usage?.speculation?.measured_speedup ?? null;
  }

  /** One line for below the answer. */
  summary() {
    const parts = [`${this.tokens} ${this.tokens === 1 ? "token" : "tokens"}`];
    if (this.tokensPerSecond !== null) parts.push(`${number(this.tokensPerSecond)} tokens/s`);
    if (this.acceptance !== null) parts.push(`${percent(this.acceptance)} of drafts kept`);
    if (this.tokensPerRound !== null) parts.push(`${this.tokensPerRound.toFixed(2)} per round`);
    if (this.secondsToFirst !== null) parts.push(`first after ${this.secondsToFirst.toFixed(2)} s`);
    return parts;
  }
}

export const number = (value) => (value >= 99.95 ? value.toFixed(0) : value.toFixed(1));
export const percent = (value) => `${Math.round(value * 100)}%`;
