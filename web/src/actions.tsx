// What can be done with machines and capsules: which of it a token and a state allow, and what is asked before.
import { call, may } from "./api";
import { ask, type Answers, type Field } from "./dialog";
import type { Call, MachineInfo, MachineState, TrustEntry } from "./schema";
import { act, sayFailure } from "./state";

type Kind = MachineState["kind"];

/** An action on one machine. */
interface Action {
  name: string;
  call: Call;
  states: Kind[];
  danger?: boolean;
  /** Asks what has to be asked, once for all machines; nothing if the user leaves it. */
  ask?: (machines: MachineInfo[]) => Promise<Answers | undefined>;
  body?: (machine: MachineInfo, given: Answers) => object;
  /** Whether the path has the name of the machine. */
  named?: boolean;
}

const names = (machines: MachineInfo[]): string => machines.map((one) => one.name).join(", ");
const tagField: Field = {
  name: "tag",
  label: "Tag",
  optional: true,
  hint: "A name for the capsule. Without one it is the newest of the machine.",
};

async function hosts(): Promise<Field["choices"]> {
  try {
    const trusted = await call<TrustEntry[]>("GET /v1/trust");
    return trusted.filter((one) => one.address).map(({ name }) => ({ value: name, label: name }));
  } catch (error) {
    sayFailure("hosts", error);
    return [];
  }
}

/** A field for a trusted host: a list where the token may see it, else its name. */
async function hostField(name: string, label: string, optional = false): Promise<Field> {
  const known = may("GET /v1/trust") ? await hosts() : [];
  if (!known?.length) return { name, label, optional };
  const none = optional ? [{ value: "", label: "none" }] : [];
  return {
    name,
    label,
    optional,
    kind: "choice",
    choices: [...none, ...known],
    value: optional ? "" : known[0]!.value,
  };
}

export const ACTIONS: Action[] = [
  { name: "Start", call: "POST /v1/machines/{name}/start", states: ["stopped", "crashed"] },
  {
    name: "Resume",
    call: "POST /v1/resume",
    states: ["suspended"],
    named: false,
    body: (machine) => ({ capsule: machine.name, name: machine.name }),
  },
  { name: "Pause", call: "POST /v1/machines/{name}/pause", states: ["running", "loading"] },
  { name: "Continue", call: "POST /v1/machines/{name}/unpause", states: ["paused"] },
  {
    name: "Checkpoint",
    call: "POST /v1/machines/{name}/checkpoint",
    states: ["running", "paused", "loading"],
    ask: (machines) =>
      ask({
        title: `Checkpoint ${names(machines)}`,
        text: "The machine keeps running; its state becomes a capsule.",
        fields: machines.length === 1 ? [tagField] : [],
        button: "Checkpoint",
      }),
    body: (_, given) => (given.tag ? { tag: given.tag } : {}),
  },
  {
    name: "Suspend",
    call: "POST /v1/machines/{name}/suspend",
    states: ["running", "paused", "loading"],
    ask: (machines) =>
      ask({
        title: `Suspend ${names(machines)}`,
        text: "The state becomes a capsule and the machine ends. It is resumed from there.",
        fields: machines.length === 1 ? [tagField] : [],
        button: "Suspend",
      }),
    body: (_, given) => (given.tag ? { tag: given.tag } : {}),
  },
  {
    name: "Migrate",
    call: "POST /v1/machines/{name}/migrate",
    states: ["running", "paused"],
    ask: askMigrate,
    body: (_, given) => ({
      host: given.host,
      mode: given.mode,
      ...(given.downtime ? { downtime_max_ms: Number(given.downtime) } : {}),
      ...(given.rate ? { rate_max: Math.round((Number(given.rate) * 1e6) / 8) } : {}),
    }),
  },
  {
    name: "Stop",
    call: "POST /v1/machines/{name}/stop",
    states: ["running", "paused", "loading"],
    danger: true,
    ask: (machines) =>
      ask({
        title: `Stop ${names(machines)}`,
        text: "The guest is asked to switch itself off. What runs in it ends; its disks stay.",
        fields: [{ name: "kill", label: "Switch it off at once, without asking the guest", kind: "check" }],
        button: "Stop",
        danger: true,
      }),
    body: (_, given) => ({ mode: given.kill ? "kill" : "powerdown" }),
  },
  {
    name: "Hardware",
    call: "POST /v1/machines/{name}/settings",
    states: ["stopped", "crashed", "running"],
    ask: askHardware,
    body: (_, given) => ({ hardware: hardwareOf(given) }),
  },
  {
    name: "Delete",
    call: "DELETE /v1/machines/{name}",
    states: ["stopped", "crashed", "suspended"],
    danger: true,
    ask: (machines) =>
      ask({
        title: `Delete ${names(machines)}`,
        text: "The machine and the changes on its disks are gone for ever. Its capsules stay in the store for as long as a name or another machine needs them.",
        button: "Delete",
        danger: true,
      }),
  },
];

const [MIB, GIB] = [1 << 20, 1 << 30];

/** What changes. Fields that were not there, since the machine runs, are not in it. */
function hardwareOf(given: Answers): object {
  return {
    ...(given.memory ? { memory: Number(given.memory) * MIB } : {}),
    ...(given.cpus ? { cpus: Number(given.cpus) } : {}),
    ...(given.display ? { display: given.display === "yes" } : {}),
    ...(given.eject === "yes" ? { eject: true } : {}),
    ...(given.disk ? { add_disks: [Number(given.disk) * GIB] } : {}),
    ...(given.net ? { add_nics: [{ bridge: given.net }] } : {}),
  };
}

async function askHardware(machines: MachineInfo[]): Promise<Answers | undefined> {
  const [first] = machines;
  const added: Field[] = [
    { name: "disk", label: "Empty disk to add, in GiB", kind: "number", optional: true },
    { name: "net", label: "Network to join with one more port", optional: true },
  ];
  if (machines.some((machine) => machine.state.kind === "running"))
    return ask({
      title: `Hardware of ${names(machines)}`,
      text: "A machine that runs gets disks and network ports. All else can change while it is stopped.",
      fields: added,
      button: "Change",
    });
  const hasCdrom = machines.some((machine) => machine.disks.some((disk) => disk.cdrom));
  return ask({
    title: `Hardware of ${names(machines)}`,
    text: "The next start boots the machine with it. Its capsules keep the hardware that they were taken with.",
    fields: [
      { name: "memory", label: "Memory in MiB", kind: "number", value: String(first!.memory / MIB) },
      { name: "cpus", label: "CPUs", kind: "number", value: String(first!.cpus) },
      {
        name: "display",
        label: "Screen",
        kind: "choice",
        value: first!.display ? "yes" : "no",
        choices: [
          { value: "no", label: "none: a serial port only" },
          { value: "yes", label: "screen, keyboard and pointer" },
        ],
      },
      ...(hasCdrom ? [{ name: "eject", label: "Take all CD-ROMs out", kind: "check" } as Field] : []),
      ...added,
    ],
    button: "Change",
  });
}

async function askMigrate(machines: MachineInfo[]): Promise<Answers | undefined> {
  return ask({
    title: `Migrate ${names(machines)}`,
    text: "The machine keeps running while its memory and disks are copied, and pauses for the last round only.",
    fields: [
      await hostField("host", "Target"),
      {
        name: "mode",
        label: "Mode",
        kind: "choice",
        value: "live",
        choices: [
          { value: "live", label: "precopy: copy while it runs, then switch" },
          { value: "lazy", label: "postcopy: switch at once, then fetch" },
          { value: "hybrid", label: "hybrid: some rounds, then postcopy" },
          { value: "stop", label: "offline: pause, copy, run there" },
        ],
      },
      { name: "downtime", label: "Longest downtime in ms", kind: "number", optional: true },
      { name: "rate", label: "Highest rate in Mbit/s", kind: "number", optional: true },
    ],
    button: "Migrate",
  });
}

/** Which actions the token allows, and whether the states of all machines do. */
export const actionsFor = (machines: MachineInfo[]): { action: Action; possible: boolean }[] =>
  ACTIONS.filter((action) => may(action.call)).map((action) => ({
    action,
    possible: machines.length > 0 && machines.every((one) => action.states.includes(one.state.kind)),
  }));

export async function perform(action: Action, machines: MachineInfo[]): Promise<void> {
  const given = action.ask ? await action.ask(machines) : {};
  if (!given) return;
  await Promise.all(
    machines.map((machine) => {
      const parameters = action.named === false ? [] : [machine.name];
      return act(`${action.name} ${machine.name}`, action.call, parameters, action.body?.(machine, given));
    }),
  );
}

/** Buttons for what can be done with all of these machines. */
export function Actions({ machines }: { machines: MachineInfo[] }) {
  const all = actionsFor(machines);
  if (all.length === 0) return null;
  return (
    <div class="actions" role="group" aria-label="Actions">
      {all.map(({ action, possible }) => (
        <button
          key={action.name}
          type="button"
          class={action.danger ? "quiet-danger" : ""}
          disabled={!possible}
          onClick={() => void perform(action, machines)}
        >
          {action.name}
        </button>
      ))}
    </div>
  );
}

/** Protects a machine, once its user has said where. */
export async function protect(machine: MachineInfo): Promise<void> {
  const given = await ask({
    title: `Protect ${machine.name}`,
    text: "A standby on another host follows the machine and takes over when this host or its QEMU fails.",
    fields: [
      await hostField("host", "Standby"),
      {
        name: "witness",
        label: "Witness",
        optional: true,
        hint: "A third host, or etcd://HOST:PORT. Without one a person decides about a takeover.",
      },
      {
        name: "spares",
        label: "Spare standbys",
        optional: true,
        hint: "Hosts that take the place of a lost standby, in this order, separated by commas.",
      },
    ],
    button: "Protect",
  });
  if (!given) return;
  const spares = (given.spares ?? "").split(/[\s,]+/).filter((host) => host);
  const body = {
    host: given.host,
    ...(given.witness ? { witness: given.witness } : {}),
    ...(spares.length > 0 ? { spares } : {}),
  };
  await act(`Protect ${machine.name}`, "POST /v1/machines/{name}/protect", [machine.name], body);
}

export async function unprotect(machine: MachineInfo): Promise<void> {
  const given = await ask({
    title: `Stop protecting ${machine.name}`,
    text: "The standby is deleted. If this host fails afterwards, the machine is lost up to its last capsule.",
    button: "Stop protecting",
    danger: true,
  });
  if (given) await act(`Unprotect ${machine.name}`, "DELETE /v1/machines/{name}/protect", [machine.name]);
}

export async function failover(machine: MachineInfo): Promise<void> {
  const given = await ask({
    title: `Switch ${machine.name} over`,
    text: "The machine ends here and goes on at its standby.",
    button: "Switch over",
    danger: true,
  });
  if (given) await act(`Failover ${machine.name}`, "POST /v1/machines/{name}/failover", [machine.name], {});
}
