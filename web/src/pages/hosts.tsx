// All hosts of the page, and their machines: each is asked for itself, so one that does not answer holds up no other.
import { useEffect, useState } from "preact/hooks";
import { callAt, Failure, type HostPlace, hostPlaces } from "../api";
import { age, bytes, plural } from "../format";
import { Head, runs, Section, StateBadge, stateText, Table } from "../parts";
import type { CallerInfo, HostInfo, MachineInfo } from "../schema";

/** Interval of the questions. */
const EVERY = 5000;

/** What a host answered last, or why it did not. */
interface Answered {
  info?: HostInfo;
  machines: MachineInfo[];
  role?: string;
  failure?: string;
}

async function askHost(name: string): Promise<Answered> {
  try {
    // Who may not ask is told so once.
    const caller = await callAt<CallerInfo>(name, "GET /v1/caller");
    const [info, machines] = await Promise.all([
      callAt<HostInfo>(name, "GET /v1/host"),
      callAt<MachineInfo[]>(name, "GET /v1/machines"),
    ]);
    return { info, machines, role: caller.role };
  } catch (error) {
    const failure =
      error instanceof Failure ? [error.message, ...(error.api.causes ?? [])].join(": ") : String(error);
    return { machines: [], failure };
  }
}

/** Answers of all hosts, asked again and again while the page is seen. */
function useHosts(places: HostPlace[]): Map<string, Answered> {
  const [answers, show] = useState<Map<string, Answered>>(new Map());
  useEffect(() => {
    let live = true;
    const timers = new Set<number>();
    const ask = async (name: string) => {
      if (!document.hidden) {
        const answered = await askHost(name);
        if (live) show((old) => new Map(old).set(name, answered));
      }
      if (!live) return;
      const timer = window.setTimeout(() => (timers.delete(timer), void ask(name)), EVERY);
      timers.add(timer);
    };
    places.forEach(({ name }) => void ask(name));
    return () => {
      live = false;
      timers.forEach((timer) => clearTimeout(timer));
    };
  }, []);
  return answers;
}

export function Hosts({ visit }: { visit: (host: string, place: string) => void }) {
  const places = hostPlaces();
  const answers = useHosts(places);
  const [filter, setFilter] = useState("");
  const text = filter.trim().toLowerCase();
  const all = places.flatMap(({ name }) =>
    (answers.get(name)?.machines ?? []).map((machine) => ({ host: name, machine })),
  );
  const shown = all.filter(({ host, machine }) =>
    `${host} ${machine.name} ${stateText(machine.state)}`.toLowerCase().includes(text),
  );
  const link = (host: string, place: string, label: string) => (
    <button type="button" class="link" onClick={() => visit(host, place)}>
      {label}
    </button>
  );
  const of = (name: string, show: (info: HostInfo) => string) => {
    const info = answers.get(name)?.info;
    return info ? show(info) : "–";
  };
  return (
    <>
      <Head title="All hosts" note={`${plural(places.length, "host")}, ${plural(all.length, "machine")}`}>
        <input
          type="search"
          aria-label="Filter machines"
          placeholder="Filter by host, name or state"
          value={filter}
          onInput={(event) => setFilter((event.target as HTMLInputElement).value)}
        />
      </Head>
      {places.map(({ name }) => {
        const failure = answers.get(name)?.failure;
        return (
          failure && (
            <p class="notice bad" role="alert" key={name}>
              {name}: {failure}
            </p>
          )
        );
      })}
      <Table
        label="Hosts"
        rows={places}
        rowKey={(one) => one.name}
        empty="The page has no hosts."
        columns={[
          { name: "Host", cell: ({ name }) => link(name, "machines", name) },
          { name: "Address", minor: true, cell: ({ address }) => address },
          { name: "Whimbrel", minor: true, cell: ({ name }) => of(name, (info) => info.version) },
          {
            name: "Running",
            kind: "number",
            cell: ({ name }) =>
              of(
                name,
                (info) => `${(answers.get(name)?.machines ?? []).filter(runs).length} of ${info.machines}`,
              ),
          },
          {
            name: "Memory left",
            kind: "number",
            cell: ({ name }) => of(name, ({ memory }) => (memory ? bytes(memory.spare) : "unknown")),
          },
          {
            name: "Disk left",
            kind: "number",
            minor: true,
            cell: ({ name }) => of(name, (info) => bytes(info.store.free)),
          },
          { name: "Your role", minor: true, cell: ({ name }) => answers.get(name)?.role ?? "–" },
        ]}
      />
      <Section title="Machines of all hosts">
        <Table
          label="Machines of all hosts"
          rows={shown}
          rowKey={({ host, machine }) => `${host}/${machine.name}`}
          empty={all.length ? "No machine matches." : "No host shows a machine."}
          columns={[
            { name: "Host", cell: ({ host }) => host },
            {
              name: "Name",
              cell: ({ host, machine }) =>
                link(host, `machines/${encodeURIComponent(machine.name)}`, machine.name),
            },
            { name: "State", cell: ({ machine }) => <StateBadge state={machine.state} /> },
            { name: "For", kind: "number", minor: true, cell: ({ machine }) => age(machine.since_ms) },
            { name: "Memory", kind: "number", cell: ({ machine }) => bytes(machine.memory) },
          ]}
        />
      </Section>
    </>
  );
}
