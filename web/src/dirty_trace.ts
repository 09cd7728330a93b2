// Dirty traces as they arrive (docs/formats/dirty-trace.md), and the working set that follows from them: the
// pages that a machine has written within the last second.

const MAGIC = "WHIMWWST";
const HEAD = 48;
const RECORD = 8;
/** Most bytes of the runs of one sample. */
const RUNS_MAX = 2 ** 28;
/** Most bytes of a number in them. */
const NUMBER_MAX = 5;

/** Pages that were written since the sample before. */
export interface Sample {
  seconds: number;
  /** First page and length. */
  runs: [number, number][];
}

/** A trace that breaks off is good up to there; one that is damaged is refused. */
export class TraceReader {
  private bytes = new Uint8Array(0);
  /** Pages of memory, once the header is there. */
  private pages: number | undefined;

  /** The samples that are complete with these bytes. */
  feed(more: Uint8Array): Sample[] {
    const joined = new Uint8Array(this.bytes.length + more.length);
    joined.set(this.bytes);
    joined.set(more, this.bytes.length);
    this.bytes = joined;
    const samples: Sample[] = [];
    if (this.pages === undefined && !this.takeHead()) return samples;
    for (let sample = this.take(); sample; sample = this.take()) samples.push(sample);
    return samples;
  }

  private view = () => new DataView(this.bytes.buffer, this.bytes.byteOffset, this.bytes.length);

  private takeHead(): boolean {
    if (this.bytes.length < HEAD) return false;
    const magic = new TextDecoder().decode(this.bytes.subarray(0, MAGIC.length));
    if (magic !== MAGIC || this.view().getUint32(8, true) !== 1)
      throw new Error("the trace has another format");
    this.pages = Number(this.view().getBigUint64(16, true));
    this.bytes = this.bytes.subarray(HEAD);
    return true;
  }

  private take(): Sample | undefined {
    if (this.bytes.length < RECORD) return undefined;
    const [length, micros] = [this.view().getUint32(0, true), this.view().getUint32(4, true)];
    if (length > RUNS_MAX) throw new Error("a sample of the trace is too large");
    if (this.bytes.length < RECORD + length) return undefined;
    const runs = decode(this.bytes.subarray(RECORD, RECORD + length), this.pages ?? 0);
    this.bytes = this.bytes.subarray(RECORD + length);
    return { seconds: micros / 1e6, runs };
  }
}

/** Runs as gaps and lengths, in LEB128, all of them below `pages`. */
function decode(bytes: Uint8Array, pages: number): [number, number][] {
  const runs: [number, number][] = [];
  let [at, page] = [0, 0];
  const number = () => {
    let value = 0;
    for (let place = 0; place < NUMBER_MAX; place++) {
      const byte = bytes[at++];
      if (byte === undefined) break;
      value += (byte & 0x7f) * 2 ** (7 * place);
      if (byte < 0x80) return value;
    }
    throw new Error("the trace is damaged");
  };
  while (at < bytes.length) {
    const [gap, length] = [number(), number()];
    runs.push([page + gap, length]);
    page += gap + length;
    if (page > pages) throw new Error("the trace names pages that the machine does not have");
  }
  return runs;
}

/** What is drawn of a sample. */
export interface Written {
  /** Seconds since the start. */
  at: number;
  /** Pages a second. */
  rate: number;
  /** Pages that were written within the last second. */
  set: number;
}

/** Pages of one piece of the counts. */
const PIECE = 2 ** 16;

/** A number for each page, which changes with each of some runs; only what is written takes memory. */
class PageCounts {
  private pieces = new Map<number, Uint16Array>();
  /** Pages whose number is not zero. */
  distinct = 0;

  change(runs: [number, number][], next: (before: number) => number): void {
    for (const [start, length] of runs)
      for (let page = start; page < start + length; page++) {
        const number = Math.floor(page / PIECE);
        let piece = this.pieces.get(number);
        if (!piece) this.pieces.set(number, (piece = new Uint16Array(PIECE)));
        const before = piece[page % PIECE]!;
        const after = (piece[page % PIECE] = next(before));
        this.distinct += Number(after > 0) - Number(before > 0);
      }
  }
}

/** Follows a trace: what was written in each sample, within a second, and at all. */
export class WorkingSet {
  private window: Sample[] = [];
  private windowSeconds = 0;
  private recent = new PageCounts();
  private ever = new PageCounts();
  private seconds = 0;

  add(sample: Sample): Written {
    this.window.push(sample);
    this.windowSeconds += sample.seconds;
    this.recent.change(sample.runs, (samples) => samples + 1);
    while (this.window.length > 1 && this.windowSeconds - this.window[0]!.seconds >= 1) {
      const old = this.window.shift()!;
      this.windowSeconds -= old.seconds;
      this.recent.change(old.runs, (samples) => samples - 1);
    }
    this.seconds += sample.seconds;
    const pages = sample.runs.reduce((sum, [, length]) => sum + length, 0);
    this.ever.change(sample.runs, () => 1);
    return { at: this.seconds, rate: pages / sample.seconds, set: this.recent.distinct };
  }

  /** Different pages that were written at all. */
  get total(): number {
    return this.ever.distinct;
  }
}
