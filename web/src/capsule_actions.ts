// What can be done with a capsule.
import { may } from "./api";
import { ask } from "./dialog";
import { short } from "./format";
import type { CapsuleInfo } from "./schema";
import { act } from "./state";

/** Names that a user gave, or the first digits. */
export const capsuleName = (capsule: CapsuleInfo): string => capsule.names[0] ?? short(capsule.id);

async function resume(capsule: CapsuleInfo): Promise<void> {
  const given = await ask({
    title: `Resume ${capsuleName(capsule)}`,
    text: capsule.active
      ? "A machine goes on from this state. Its pages are loaded when they are touched."
      : "This capsule has disks only, so the machine boots.",
    fields: [
      { name: "name", label: "Name of the machine", value: capsule.machine },
      {
        name: "mode",
        label: "Pages",
        kind: "choice",
        value: "lazy",
        choices: [
          { value: "lazy", label: "when they are touched" },
          { value: "full", label: "all before it runs" },
        ],
      },
    ],
    button: "Resume",
  });
  if (!given) return;
  const body = { capsule: capsule.id, name: given.name, mode: given.mode };
  await act(`Resume ${given.name}`, "POST /v1/resume", [], body);
}

async function clone(capsule: CapsuleInfo): Promise<void> {
  const given = await ask({
    title: `Clone ${capsuleName(capsule)}`,
    text: "Machines that go on from this state, called PREFIX-1, PREFIX-2 and so on.",
    fields: [
      { name: "prefix", label: "Prefix of their names", value: capsule.machine },
      { name: "count", label: "How many", kind: "number", value: "1" },
      {
        name: "network",
        label: "Network",
        kind: "choice",
        value: "isolated",
        choices: [
          { value: "isolated", label: "unplugged: each has the address of the original" },
          { value: "same", label: "as the original, with new hardware addresses" },
        ],
      },
    ],
    button: "Clone",
  });
  if (!given) return;
  const body = {
    capsule: capsule.id,
    prefix: given.prefix,
    count: Number(given.count),
    network: given.network,
  };
  await act(`Clone ${capsuleName(capsule)}`, "POST /v1/clone", [], body);
}

async function rewind(capsule: CapsuleInfo): Promise<void> {
  const given = await ask({
    title: `Rewind to ${capsuleName(capsule)}`,
    text: "The machine goes on from this state. What it is now becomes a capsule first, so nothing is lost.",
    fields: [{ name: "machine", label: "Machine", value: capsule.machine }],
    button: "Rewind",
    danger: true,
  });
  if (!given) return;
  const body = { capsule: capsule.id };
  await act(`Rewind ${given.machine}`, "POST /v1/machines/{name}/rewind", [given.machine!], body);
}

async function tag(capsule: CapsuleInfo): Promise<void> {
  const given = await ask({
    title: `Tag ${short(capsule.id)}`,
    text: "A tag keeps the capsule. If another capsule has this tag, it moves here.",
    fields: [{ name: "tag", label: "Tag" }],
    button: "Tag",
  });
  if (given) await act(`Tag ${given.tag}`, "PUT /v1/tags/{tag}", [given.tag!], { capsule: capsule.id });
}

async function untag(capsule: CapsuleInfo): Promise<void> {
  const given = await ask({
    title: `Remove a name of ${short(capsule.id)}`,
    text: "A capsule without a name is deleted by the next garbage collection, unless a machine or a child needs it.",
    fields: [
      {
        name: "name",
        label: "Name",
        kind: "choice",
        value: capsule.names[0]!,
        choices: capsule.names.map((name) => ({ value: name, label: name })),
      },
    ],
    button: "Untag",
    danger: true,
  });
  if (given) await act(`Remove ${given.name}`, "DELETE /v1/capsules/{capsule}", [given.name!]);
}

export interface CapsuleAction {
  name: string;
  danger?: boolean;
  run: (capsule: CapsuleInfo) => Promise<void>;
}

/** What the token and the capsule allow. */
export function capsuleActions(capsule: CapsuleInfo): CapsuleAction[] {
  const all: (CapsuleAction | false)[] = [
    may("POST /v1/resume") && { name: "Resume", run: resume },
    may("POST /v1/machines/{name}/rewind") && capsule.active && { name: "Rewind", run: rewind },
    may("POST /v1/clone") && { name: "Clone", run: clone },
    may("PUT /v1/tags/{tag}") && { name: "Tag", run: tag },
    may("DELETE /v1/capsules/{capsule}") &&
      capsule.names.length > 0 && { name: "Untag", danger: true, run: untag },
  ];
  return all.filter((one) => one !== false);
}
