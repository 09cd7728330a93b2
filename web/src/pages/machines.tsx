// All machines of the host: filtered, selected, acted upon; and those of the hosts that it trusts.
import { useState } from "preact/hooks";
import { Actions } from "../actions";
import { may } from "../api";
import { age, bytes, percent, plural } from "../format";
import { type Column, Head, Loaded, runs, Section, StateBadge, stateText, Table, moves } from "../parts";
import type { HostMachines, MachineInfo, TrustEntry } from "../schema";
import { usePoll } from "../state";
import { type Rates, useUsage } from "../usage";

const owned = (machine: MachineInfo): number => machine.disks.reduce((sum, disk) => sum + disk.owned, 0);
const size = (machine: MachineInfo): number => machine.disks.reduce((sum, disk) => sum + disk.size, 0);

/** What else is to be known of a machine, in a few words. */
function notes(machine: MachineInfo): string {
  const { state, protection, uploads } = machine;
  const all: string[] = [];
  if (state.kind === "loading")
    all.push(`${Math.round((100 * state.resident_pages) / state.total_pages)} % of pages here`);
  if (state.kind === "crashed" || state.kind === "unreadable") all.push(state.reason);
  if (state.kind === "handed_off" || state.kind === "serving_pages") all.push(`to ${state.to}`);
  if (protection?.role === "primary") all.push(`${protection.state.kind} by ${protection.host}`);
  if (protection?.role === "standby") all.push(`standby of ${protection.host}`);
  if (uploads) all.push(`uploaded to ${uploads.to}`);
  return all.join(", ");
}

export function Machines() {
  const polled = usePoll<MachineInfo[]>("GET /v1/machines", [], 2000, (all) => all.some(moves));
  const [filter, setFilter] = useState("");
  const [chosen, choose] = useState<Set<string>>(new Set());
  const usage = useUsage();
  const all = polled.data ?? [];
  const text = filter.trim().toLowerCase();
  const shown = all.filter((one) =>
    `${one.name} ${stateText(one.state)} ${notes(one)}`.toLowerCase().includes(text),
  );
  const selected = shown.filter((one) => chosen.has(one.name));
  const running = all.filter(runs).length;
  const toggle = (names: string[], on: boolean) => {
    const next = new Set(chosen);
    names.forEach((name) => (on ? next.add(name) : next.delete(name)));
    choose(next);
  };
  return (
    <>
      <Head title="Machines" note={polled.data && `${plural(all.length, "machine")}, ${running} running`}>
        <input
          type="search"
          aria-label="Filter machines"
          placeholder="Filter by name or state"
          value={filter}
          onInput={(event) => setFilter((event.target as HTMLInputElement).value)}
        />
      </Head>
      {may("POST /v1/machines/{name}/stop") && (
        <div class={`selection ${selected.length ? "" : "none"}`}>
          <label class="check">
            <input
              type="checkbox"
              checked={selected.length > 0 && selected.length === shown.length}
              onChange={(event) =>
                toggle(
                  shown.map((one) => one.name),
                  (event.target as HTMLInputElement).checked,
                )
              }
            />
            {selected.length ? `${selected.length} selected` : "Select all"}
          </label>
          <Actions machines={selected} />
        </div>
      )}
      <Loaded polled={polled}>
        {() => (
          <Table
            label="Machines"
            columns={columns(chosen, toggle, (name) => usage.get(name)?.at(-1))}
            rows={shown}
            rowKey={(one) => one.name}
            selected={(one) => chosen.has(one.name)}
            empty={
              all.length
                ? "No machine matches."
                : "There is no machine yet. `whimbrel run` makes one; a capsule can be resumed here."
            }
          />
        )}
      </Loaded>
      {may("GET /v1/hosts") && <OtherHosts text={text} />}
    </>
  );
}

/** Machines of other hosts, which are asked only if this one trusts any. */
function OtherHosts({ text }: { text: string }) {
  const trusted = usePoll<TrustEntry[]>("GET /v1/trust", [], 30_000);
  return trusted.data?.length ? <Elsewhere text={text} /> : null;
}

/** Machines of the hosts that this one trusts, as far as they show them. */
function Elsewhere({ text }: { text: string }) {
  const polled = usePoll<HostMachines[]>("GET /v1/hosts", [], 10_000);
  // The first one is this host.
  const others = (polled.data ?? []).slice(1);
  if (others.length === 0) return null;
  const silent = others.filter((host) => host.failure);
  const rows = others.flatMap((host) => host.machines.map((machine) => ({ host: host.name, machine })));
  const shown = rows.filter(({ host, machine }) =>
    `${host} ${machine.name} ${stateText(machine.state)} ${notes(machine)}`.toLowerCase().includes(text),
  );
  return (
    <Section title="Machines of other hosts">
      {silent.map((host) => (
        <p class="notice" key={host.name}>
          {host.name} does not answer: {host.failure}
        </p>
      ))}
      <Table
        label="Machines of other hosts"
        rows={shown}
        rowKey={({ host, machine }) => `${host}/${machine.name}`}
        empty={rows.length ? "No machine matches." : "No other host shows a machine."}
        columns={[
          { name: "Host", cell: ({ host }) => host },
          { name: "Name", cell: ({ machine }) => machine.name },
          { name: "State", cell: ({ machine }) => <StateBadge state={machine.state} /> },
          { name: "For", kind: "number", minor: true, cell: ({ machine }) => age(machine.since_ms) },
          { name: "Memory", kind: "number", cell: ({ machine }) => bytes(machine.memory) },
          { name: "Notes", kind: "wide", minor: true, cell: ({ machine }) => notes(machine) },
        ]}
      />
    </Section>
  );
}

function columns(
  chosen: Set<string>,
  toggle: (names: string[], on: boolean) => void,
  used: (name: string) => Rates | undefined,
): Column<MachineInfo>[] {
  const now = (machine: MachineInfo, show: (rates: Rates) => string) => {
    const rates = used(machine.name);
    return rates ? show(rates) : "–";
  };
  const box: Column<MachineInfo> = {
    name: "Selection",
    unseen: true,
    kind: "tight",
    cell: (one) => (
      <input
        type="checkbox"
        aria-label={`Select ${one.name}`}
        checked={chosen.has(one.name)}
        onChange={(event) => toggle([one.name], (event.target as HTMLInputElement).checked)}
      />
    ),
  };
  const rest: Column<MachineInfo>[] = [
    { name: "Name", cell: (one) => <a href={`#/machines/${one.name}`}>{one.name}</a> },
    { name: "State", cell: (one) => <StateBadge state={one.state} /> },
    { name: "For", kind: "number", cell: (one) => age(one.since_ms) },
    { name: "CPUs", kind: "number", minor: true, cell: (one) => one.cpus },
    { name: "CPU use", kind: "number", cell: (one) => now(one, (rates) => percent(rates.cpu)) },
    { name: "Memory", kind: "number", cell: (one) => bytes(one.memory) },
    {
      name: "Memory used",
      kind: "number",
      minor: true,
      cell: (one) => now(one, (rates) => bytes(rates.resident)),
    },
    {
      name: "Network",
      kind: "number",
      minor: true,
      cell: (one) => now(one, (rates) => `${bytes(rates.received + rates.sent)}/s`),
    },
    {
      name: "Disks",
      kind: "number",
      minor: true,
      cell: (one) => (one.disks.length ? bytes(size(one)) : "–"),
    },
    {
      name: "Changed",
      kind: "number",
      minor: true,
      cell: (one) => (one.disks.length ? bytes(owned(one)) : "–"),
    },
    { name: "Notes", kind: "wide", minor: true, cell: (one) => <span title={notes(one)}>{notes(one)}</span> },
  ];
  return may("POST /v1/machines/{name}/stop") ? [box, ...rest] : rest;
}
