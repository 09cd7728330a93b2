// One machine: what it is, its console, its disks and network, its protection, its capsules.
import { useEffect, useState } from "preact/hooks";
import { Actions, failover, protect, unprotect } from "../actions";
import { consoleLog, Failure, may } from "../api";
import { ask } from "../dialog";
import { age, bytes, count, duration, percent, short, time } from "../format";
import { Console, Display, UsageChart } from "../lazy";
import { heard } from "../live";
import { Bar, Facts, Head, Loaded, moves, Section, StateBadge, Table } from "../parts";
import type { GraphNode, HostEvent, MachineInfo, NetworkInfo, ProtectionInfo } from "../schema";
import { act, usePoll } from "../state";
import { useUsage } from "../usage";
import { CapsuleTree } from "./capsules";
import { Writes } from "./writes";

const TABS = [
  ["", "Overview"],
  ["console", "Console"],
  ["display", "Screen"],
  ["log", "Log"],
  ["writes", "Writes"],
  ["protection", "Protection"],
  ["capsules", "Capsules"],
] as const;

export function Machine({ name, tab }: { name: string; tab: string }) {
  const polled = usePoll<MachineInfo>("GET /v1/machines/{name}", [name], 2000, moves);
  const machine = polled.data;
  const tabs = TABS.filter(([one]) => hasTab(one, machine));
  return (
    <>
      <p class="path">
        <a href="#/machines">Machines</a>
      </p>
      <Head title={name} note={machine && <StateBadge state={machine.state} />} />
      {machine && <Actions machines={[machine]} />}
      <nav class="tabs" aria-label={`Views of ${name}`}>
        {tabs.map(([one, label]) => (
          <a
            key={one}
            href={`#/machines/${name}${one && `/${one}`}`}
            aria-current={one === tab ? "page" : undefined}
          >
            {label}
          </a>
        ))}
      </nav>
      <Loaded polled={polled}>{(it) => <View machine={it} tab={tab} />}</Loaded>
    </>
  );
}

/** Whether there is such a view of a machine, and this user may have it. */
function hasTab(tab: string, machine: MachineInfo | undefined): boolean {
  if (tab === "console") return may("GET /v1/machines/{name}/console");
  if (tab === "display") return !!machine?.display && may("GET /v1/machines/{name}/display");
  if (tab === "writes") return may("POST /v1/machines/{name}/wws");
  return true;
}

function View({ machine, tab }: { machine: MachineInfo; tab: string }) {
  switch (tab) {
    case "console":
      return machine.pid ? (
        <Console name={machine.name} />
      ) : (
        <p class="empty">A machine has a console while it runs.</p>
      );
    case "display":
      return machine.pid && machine.display ? (
        <Display name={machine.name} />
      ) : (
        <p class="empty">
          {machine.display ? "A machine has a screen while it runs." : "This machine has no screen."}
        </p>
      );
    case "log":
      return <Log name={machine.name} />;
    case "writes":
      return <Writes machine={machine} />;
    case "protection":
      return <Protection machine={machine} />;
    case "capsules":
      return <Capsules name={machine.name} />;
    default:
      return <Overview machine={machine} />;
  }
}

const capsuleLink = (id: string | null | undefined) => id && <a href={`#/capsules/${id}`}>{short(id)}</a>;

function Overview({ machine }: { machine: MachineInfo }) {
  const { state, tunnel, uploads, taken_over, process: served } = machine;
  const reason = "reason" in state ? state.reason : undefined;
  return (
    <>
      {reason && <p class="notice bad">{reason}</p>}
      {state.kind === "loading" && (
        <p class="notice">
          Pages that are here: {count(state.resident_pages)} of {count(state.total_pages)}
          <Bar done={state.resident_pages} total={state.total_pages} label="Pages that are here" />
          {state.stalled}
        </p>
      )}
      <Facts
        facts={[
          ["CPUs", `${machine.cpus}, by ${machine.accel}`],
          ["Memory", bytes(machine.memory)],
          [`In this state since`, `${time(machine.since_ms)} (${age(machine.since_ms)})`],
          ["Process", machine.pid],
          ["Served by", served && `process ${served.pid}, version ${served.version}`],
          ["Resumed or cloned from", capsuleLink(machine.origin)],
          ["Next capsule follows", capsuleLink(machine.follows)],
          ["Operation", machine.operation && <a href="#/operations">{String(machine.operation)}</a>],
          ["Generation", machine.vmgenid],
          [
            "Tunnel",
            tunnel &&
              `home ${tunnel.home}, ${tunnel.connected ? "connected" : (tunnel.reason ?? "not connected")}`,
          ],
          ["Uploads", uploads && `to ${uploads.to}${uploads.stalled ? `: ${uploads.stalled}` : ""}`],
          ["Taken over", taken_over && `from ${taken_over.from}, ${time(taken_over.at_ms)}`],
        ]}
      />
      {machine.pid && <Usage machine={machine} />}
      <Section title="Disks">
        <Table
          label="Disks"
          rows={machine.disks.map((disk, index) => ({ ...disk, name: `disk${index}` }))}
          rowKey={(disk) => disk.name}
          empty="This machine has no disk."
          columns={[
            { name: "Disk", cell: (disk) => disk.name },
            { name: "Size", kind: "number", cell: (disk) => bytes(disk.size) },
            { name: "Changed here", kind: "number", cell: (disk) => bytes(disk.owned) },
            { name: "Based on", kind: "wide", cell: (disk) => <span title={disk.base}>{disk.base}</span> },
          ]}
        />
      </Section>
      <Section title="Network ports">
        <Table
          label="Network ports"
          rows={machine.nics.map((nic, index) => ({ ...nic, name: `net${index}` }))}
          rowKey={(nic) => nic.name}
          empty="This machine has no network port."
          columns={[
            { name: "Port", cell: (nic) => nic.name },
            { name: "Bridge", cell: (nic) => nic.bridge ?? "unplugged" },
            { name: "Hardware address", kind: "wide", cell: (nic) => <code>{nic.mac}</code> },
          ]}
        />
      </Section>
      <Published name={machine.name} />
      <Events of={machine.name} title="What happened" />
    </>
  );
}

/** What the machine uses now and has used while this page was open. */
function Usage({ machine }: { machine: MachineInfo }) {
  const rates = useUsage().get(machine.name) ?? [];
  const now = rates.at(-1);
  if (!now) return null;
  const both = (into: number, out: number) => `${bytes(into)}/s in, ${bytes(out)}/s out`;
  return (
    <Section title="Use">
      <Facts
        facts={[
          ["CPU", `${percent(now.cpu)} of ${percent(machine.cpus)}`],
          ["Memory of the host", bytes(now.resident)],
          ["Network", both(now.received, now.sent)],
          ["Disks", `${bytes(now.read)}/s read, ${bytes(now.written)}/s written`],
        ]}
      />
      <UsageChart rates={rates} />
    </Section>
  );
}

/** What an event says, in words. */
function eventText(event: HostEvent): string {
  const text = event.text ?? "";
  switch (event.kind) {
    case "machine":
      return text.replaceAll("_", " ");
    case "machine_removed":
      return "deleted";
    case "settings":
      return "settings changed";
    case "takeover":
      return `taken over ${text}`;
    case "self_start":
      return `by itself: ${text}`;
    case "schedule":
      return `schedule ${text}`;
    case "operation_started":
      return `${event.operation} started`;
    case "operation_ended":
      return `${event.operation} ${text}`;
    case "missed":
      return "earlier events are no longer known";
  }
}

/** Events of a machine that the host still knows, newest first. */
function Events({ of, title, only }: { of: string; title: string; only?: HostEvent["kind"] }) {
  const all = heard.use().filter((event) => event.subject === of && (!only || event.kind === only));
  return (
    <Section title={title}>
      <Table
        label={title}
        rows={all.reverse()}
        rowKey={(event) => String(event.number)}
        empty="The host knows of nothing since it was started."
        columns={[
          {
            name: "When",
            cell: (event) => <span title={time(event.time_ms)}>{age(event.time_ms)} ago</span>,
          },
          { name: "What", kind: "wide", cell: (event) => eventText(event) },
        ]}
      />
    </Section>
  );
}

/** Ports of the host that lead to the machine, of all managed networks. */
function Published({ name }: { name: string }) {
  const polled = usePoll<NetworkInfo[]>("GET /v1/networks", [], 5000);
  const networks = polled.data ?? [];
  const managed = networks.some((network) => network.machines.some((one) => one.machine === name));
  const ports = networks.flatMap((network) => network.ports).filter((port) => port.machine === name);
  if (!managed && ports.length === 0) return null;
  const allowed = may("POST /v1/machines/{name}/ports");
  const publish = async () => {
    const given = await ask({
      title: `Publish a port of ${name}`,
      text: "Whoever reaches this port of the host reaches the machine.",
      fields: [
        { name: "port", label: "Port of the host", kind: "number" },
        { name: "guest", label: "Port of the machine", kind: "number" },
      ],
      button: "Publish",
    });
    if (!given) return;
    const publish = [{ port: Number(given.port), guest_port: Number(given.guest) }];
    await act(`Publish ${given.port}`, "POST /v1/machines/{name}/ports", [name], { publish });
  };
  const remove = (port: number, protocol: string) =>
    act(`Port ${port}`, "POST /v1/machines/{name}/ports", [name], { unpublish: [{ port, protocol }] });
  return (
    <Section
      title="Published ports"
      tools={
        allowed && (
          <button type="button" onClick={() => void publish()}>
            Publish a port
          </button>
        )
      }
    >
      <Table
        label="Published ports"
        rows={ports}
        rowKey={(port) => `${port.protocol}${port.port}`}
        empty="No port of the host leads to this machine."
        columns={[
          { name: "Host", cell: (port) => `${port.listen ?? "*"}:${port.port}` },
          { name: "Machine", cell: (port) => `${port.address}:${port.guest_port}` },
          { name: "Protocol", cell: (port) => port.protocol },
          {
            name: "Actions",
            unseen: true,
            kind: "wide",
            cell: (port) =>
              allowed && (
                <button
                  type="button"
                  class="quiet-danger"
                  onClick={() => void remove(port.port, port.protocol)}
                >
                  Unpublish
                </button>
              ),
          },
        ]}
      />
    </Section>
  );
}

function Log({ name }: { name: string }) {
  const [text, setText] = useState<string>();
  const [problem, setProblem] = useState<string>();
  const read = () =>
    consoleLog(name).then(
      (log) => setText(log),
      (error) => setProblem(error instanceof Failure ? error.message : String(error)),
    );
  useEffect(() => void read(), [name]);
  return (
    <Section
      title="Console log"
      tools={
        <button type="button" onClick={() => void read()}>
          Read again
        </button>
      }
    >
      {problem && <p class="notice bad">{problem}</p>}
      <pre class="log" role="region" tabIndex={0} aria-label="Console log">
        {text === "" ? "The machine has printed nothing." : text?.replace(/\x1b\[[0-9;?]*[A-Za-z]/g, "")}
      </pre>
    </Section>
  );
}

function Protection({ machine }: { machine: MachineInfo }) {
  const taken = machine.taken_over;
  return (
    <>
      <ProtectionOf machine={machine} />
      {taken && (
        <p class="notice">
          This host took {machine.name} over from {taken.from}, {time(taken.at_ms)}.
        </p>
      )}
      <Events of={machine.name} title="Takeovers" only="takeover" />
    </>
  );
}

function ProtectionOf({ machine }: { machine: MachineInfo }) {
  const protection = machine.protection;
  if (!protection) {
    return (
      <div class="empty">
        <p>This machine is not protected: it ends when its host fails.</p>
        {may("POST /v1/machines/{name}/protect") && machine.state.kind === "running" && (
          <button type="button" class="primary" onClick={() => void protect(machine)}>
            Protect
          </button>
        )}
      </div>
    );
  }
  return (
    <>
      <div class="actions" role="group" aria-label="Protection">
        {may("POST /v1/machines/{name}/failover") && (
          <button type="button" onClick={() => void failover(machine)}>
            Switch over
          </button>
        )}
        {may("DELETE /v1/machines/{name}/protect") && (
          <button type="button" class="quiet-danger" onClick={() => void unprotect(machine)}>
            Stop protecting
          </button>
        )}
      </div>
      <ProtectionFacts protection={protection} />
    </>
  );
}

const WITNESS = { true: "answers", false: "does not answer" } as const;

function ProtectionFacts({ protection }: { protection: ProtectionInfo }) {
  const { state, figures } = protection;
  const answers = protection.witness_answers;
  return (
    <>
      {"reason" in state && <p class="notice bad">{state.reason}</p>}
      <Facts
        facts={[
          ["State", state.kind],
          [protection.role === "primary" ? "Standby" : "Primary", protection.host],
          [
            "Witness",
            protection.witness
              ? `${protection.witness}${answers == null ? "" : `, ${WITNESS[`${answers}`]}`}`
              : "none: a person decides about a takeover",
          ],
          ["Last epoch", count(protection.epoch)],
          ["Lag", duration(protection.lag_ms)],
          ["Spare standbys", protection.spares?.join(", ")],
          ["Mode", protection.mode],
          ["Group", protection.group],
          ["Epoch", figures && `${duration(figures.epoch_ms)} (${count(figures.epochs)} so far)`],
          ["Pause", figures && `${duration(figures.pause_p50_ms)}, 99 %: ${duration(figures.pause_p99_ms)}`],
          [
            "Output waits",
            figures &&
              `${duration(figures.output_delay_p50_ms)}, 99 %: ${duration(figures.output_delay_p99_ms)}`,
          ],
          ["Dirty pages an epoch", figures && count(Math.round(figures.dirty_pages))],
          ["Sent", figures && `${bytes(figures.sent_bytes)} of ${bytes(figures.dirty_bytes)} in dirty pages`],
        ]}
      />
    </>
  );
}

function Capsules({ name }: { name: string }) {
  const polled = usePoll<GraphNode[]>("GET /v1/graph", [], 5000);
  return (
    <Loaded polled={polled}>
      {(all) => (
        <CapsuleTree
          nodes={all.filter((node) => node.machine === name)}
          empty="No capsule was taken of this machine."
        />
      )}
    </Loaded>
  );
}
