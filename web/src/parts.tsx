// Parts that pages are made of: heads, facts, states, tables that stay quick with thousands of rows.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { MachineInfo, MachineState } from "./schema";
import type { Polled } from "./state";

export function Head({
  title,
  note,
  children,
}: {
  title: string;
  note?: ComponentChildren;
  children?: ComponentChildren;
}) {
  useEffect(() => {
    document.title = `${title} – Whimbrel`;
  }, [title]);
  return (
    <header class="head">
      <h1 tabIndex={-1}>{title}</h1>
      {note && <div class="note">{note}</div>}
      {children && <div class="tools">{children}</div>}
    </header>
  );
}

/** The answer once it is there; before, that it is awaited or why it does not come. */
export function Loaded<T>({
  polled,
  children,
}: {
  polled: Polled<T>;
  children: (data: T) => ComponentChildren;
}) {
  return (
    <>
      {polled.failure && (
        <p class="notice bad" role="alert">
          {polled.failure.message}
          {polled.failure.api.hint && <span class="hint"> {polled.failure.api.hint}</span>}
        </p>
      )}
      {polled.data !== undefined
        ? children(polled.data)
        : !polled.failure && (
            <p class="empty" role="status">
              Loading …
            </p>
          )}
    </>
  );
}

/** Names and values, in columns where there is room. */
export function Facts({ facts }: { facts: [string, ComponentChildren][] }) {
  const known = facts.filter(
    ([, value]) => value !== undefined && value !== null && value !== "" && value !== false,
  );
  return (
    <dl class="facts">
      {known.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Section({
  title,
  children,
  tools,
}: {
  title: string;
  children: ComponentChildren;
  tools?: ComponentChildren;
}) {
  return (
    <section class="section" aria-label={title}>
      <div class="section-head">
        <h2>{title}</h2>
        {tools}
      </div>
      {children}
    </section>
  );
}

const TONES: Partial<Record<MachineState["kind"], string>> = {
  running: "good",
  loading: "good",
  starting: "busy",
  migrating: "busy",
  serving_pages: "busy",
  crashed: "bad",
  unreadable: "bad",
  paused: "warn",
};

/** The state of a machine: a word, and a colour that only repeats it. */
export function StateBadge({ state }: { state: MachineState }) {
  return <Badge tone={TONES[state.kind] ?? "quiet"} text={stateText(state)} />;
}

/** Whether figures of a machine change without an event. */
export const moves = (machine: MachineInfo): boolean =>
  !!machine.protection || machine.state.kind === "loading" || machine.state.kind === "serving_pages";

/** States in which the CPUs of a machine run. */
const RUNNING = new Set<string>(["running", "loading", "migrating"]);
export const runs = (machine: MachineInfo): boolean => RUNNING.has(machine.state.kind);

export const stateText = (state: MachineState): string => state.kind.replaceAll("_", " ");

export function Badge({ tone, text }: { tone: string; text: string }) {
  return (
    <span class={`badge ${tone}`}>
      <span class="dot" aria-hidden="true" />
      {text}
    </span>
  );
}

export function Bar({ done, total, label }: { done: number; total: number; label: string }) {
  return <progress value={done} max={Math.max(total, 1)} aria-label={label} />;
}

export interface Column<Row> {
  name: string;
  /** Style of the column: `wide` takes the room that is left, `number` aligns right. */
  kind?: "wide" | "number" | "tight";
  /** Whether only screen readers have its name. */
  unseen?: boolean;
  /** Left out on narrow screens. */
  minor?: boolean;
  cell: (row: Row) => ComponentChildren;
}

interface TableProps<Row> {
  label: string;
  columns: Column<Row>[];
  rows: Row[];
  rowKey: (row: Row) => string;
  empty: string;
  selected?: (row: Row) => boolean;
}

/** Rows beyond what is seen that are there anyway, for scrolling and for the keyboard. */
const MARGIN = 20;
/** Tables of fewer rows are there as a whole, so that a search of the browser finds everything. */
const WHOLE = 150;

/** A table; of a long one only the rows that are seen exist. All rows have one height, which the style says. */
export function Table<Row>({ label, columns, rows, rowKey, empty, selected }: TableProps<Row>) {
  const body = useRef<HTMLTableSectionElement>(null);
  const [from, to, height] = useWindow(body, rows.length);
  if (rows.length === 0) return <p class="empty">{empty}</p>;
  const style = (column: Column<Row>) => `${column.kind ?? ""} ${column.minor ? "minor" : ""}`;
  return (
    <div class="table-frame" role="group" aria-label={label} tabIndex={0}>
      <table aria-label={label} aria-rowcount={rows.length + 1}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column.name} scope="col" class={style(column)}>
                {column.unseen ? <span class="unseen">{column.name}</span> : column.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody ref={body}>
          <Space rows={from} height={height} columns={columns.length} />
          {rows.slice(from, to).map((row, index) => (
            <tr key={rowKey(row)} aria-rowindex={from + index + 2} class={selected?.(row) ? "selected" : ""}>
              {columns.map((column) => (
                <td key={column.name} class={style(column)}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
          <Space rows={rows.length - to} height={height} columns={columns.length} />
        </tbody>
      </table>
    </div>
  );
}

function Space({ rows, height, columns }: { rows: number; height: number; columns: number }) {
  if (rows <= 0) return null;
  return (
    <tr aria-hidden="true" class="space">
      <td colSpan={columns} style={{ height: `${rows * height}px` }} />
    </tr>
  );
}

/** Which rows are seen, and the height of one. */
function useWindow(body: { current: HTMLElement | null }, count: number): [number, number, number] {
  const [range, set] = useState<[number, number, number]>([0, Math.min(count, WHOLE), 0]);
  useEffect(() => {
    if (count <= WHOLE) return set([0, count, 0]);
    const look = () => {
      const row = body.current?.querySelector<HTMLElement>("tr:not(.space)");
      if (!body.current || !row) return;
      const height = row.getBoundingClientRect().height;
      const first = Math.floor(-body.current.getBoundingClientRect().top / height) - MARGIN;
      const from = Math.max(0, Math.min(first, count - 1));
      const to = Math.min(count, from + Math.ceil(innerHeight / height) + 2 * MARGIN);
      set((old) => (old[0] === from && old[1] === to && old[2] === height ? old : [from, to, height]));
    };
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, [count]);
  return [Math.min(range[0], count), Math.min(range[1], count), range[2]];
}
