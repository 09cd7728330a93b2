// The host: its room, its store, the hosts that it trusts, and the tokens of its API.
import { useState } from "preact/hooks";
import { may } from "../api";
import { ask } from "../dialog";
import { bytes, duration, plural, time } from "../format";
import { Bar, Facts, Head, Loaded, Section, Table } from "../parts";
import type { HostInfo, HostMachines, HostMemory, NewToken, TokenInfo, TrustEntry } from "../schema";
import { act, usePoll } from "../state";

export function Host() {
  const polled = usePoll<HostInfo>("GET /v1/host", [], 5000);
  return (
    <Loaded polled={polled}>
      {(host) => (
        <>
          <Head title={host.name} note={`Whimbrel ${host.version}`} />
          <Facts
            facts={[
              ["Runs since", duration(host.uptime_s * 1000)],
              ["Machines", host.machines],
              ["QEMU", host.qemu_version ?? "not installed"],
              ["Executor", host.accel],
              ["Other hosts connect to", host.listen ?? "none can connect"],
              ["Data", <code>{host.data}</code>],
              ["Public key", <code>{host.public_key}</code>],
            ]}
          />
          {host.memory && <Memory memory={host.memory} />}
          <Store host={host} />
          {may("GET /v1/trust") && <Trust />}
          {may("GET /v1/tokens") && <Tokens />}
        </>
      )}
    </Loaded>
  );
}

function Memory({ memory }: { memory: HostMemory }) {
  return (
    <Section title="Memory">
      <Bar done={memory.total - memory.spare} total={memory.total} label="Memory that is used or promised" />
      <Facts
        facts={[
          ["Of the host", bytes(memory.total)],
          ["Left for new machines", bytes(memory.spare)],
        ]}
      />
    </Section>
  );
}

function Store({ host }: { host: HostInfo }) {
  const { capsules, stored, logical, free } = host.store;
  const tools = (
    <span class="row-actions">
      {may("POST /v1/store/gc") && (
        <button type="button" onClick={() => void act("Garbage collection", "POST /v1/store/gc", [])}>
          Free space
        </button>
      )}
      {may("POST /v1/store/verify") && (
        <button type="button" onClick={() => void act("Verify the store", "POST /v1/store/verify", [])}>
          Verify
        </button>
      )}
    </span>
  );
  return (
    <Section title="Store" tools={tools}>
      <Bar done={stored} total={stored + free} label="Disk that the store uses" />
      <Facts
        facts={[
          ["Capsules", capsules],
          ["On disk", bytes(stored)],
          ["Free", bytes(free)],
          ["Images without sharing", bytes(logical)],
          ["Saved", stored > 0 && logical > stored ? `${(logical / stored).toFixed(1)} times` : undefined],
        ]}
      />
    </Section>
  );
}

const patterns = (list: string[] | null | undefined, other: string[] | null | undefined): string =>
  list ? list.join(", ") || "nothing" : other ? "nothing" : "everything";

function Trust() {
  const polled = usePoll<TrustEntry[]>("GET /v1/trust", [], 10_000);
  const asked = usePoll<HostMachines[]>("GET /v1/hosts", [], 10_000);
  const of = (name: string) => asked.data?.find((host) => host.name === name);
  const answered = (name: string, show: (host: HostMachines) => string) => {
    const host = of(name);
    return host && !host.failure ? show(host) : "–";
  };
  return (
    <Section title="Trusted hosts">
      <Loaded polled={polled}>
        {(all) => (
          <Table
            label="Trusted hosts"
            rows={all}
            rowKey={(one) => one.name}
            empty="This host trusts no other. `whimbrel trust add` makes it."
            columns={[
              { name: "Host", cell: (one) => one.name },
              { name: "Address", cell: (one) => one.address ?? "none" },
              {
                name: "Machines",
                kind: "number",
                cell: ({ name }) => answered(name, (host) => String(host.machines.length)),
              },
              {
                name: "Memory left",
                kind: "number",
                minor: true,
                cell: ({ name }) =>
                  answered(name, ({ memory }) => (memory ? bytes(memory.spare) : "unknown")),
              },
              { name: "Answers", minor: true, cell: ({ name }) => answers(of(name)) },
              { name: "May read", cell: (one) => patterns(one.read, one.write) },
              { name: "May write", kind: "wide", cell: (one) => patterns(one.write, one.read) },
            ]}
          />
        )}
      </Loaded>
    </Section>
  );
}

function answers(host: HostMachines | undefined) {
  if (!host) return "";
  return host.failure ? <span title={host.failure}>no</span> : "yes";
}

function Tokens() {
  const polled = usePoll<TokenInfo[]>("GET /v1/tokens", [], 10_000);
  const [made, setMade] = useState<NewToken>();
  const tools = may("POST /v1/tokens") && (
    <button type="button" onClick={() => void createToken().then((token) => token && setMade(token))}>
      Create a token
    </button>
  );
  return (
    <Section title="Tokens" tools={tools}>
      {made && (
        <div class="notice good" role="status">
          The token {made.name}, which is shown only now: <code class="secret">{made.token}</code>{" "}
          <button type="button" onClick={() => void navigator.clipboard?.writeText(made.token)}>
            Copy
          </button>{" "}
          <button type="button" onClick={() => setMade(undefined)}>
            Hide
          </button>
        </div>
      )}
      <Loaded polled={polled}>
        {(all) => (
          <Table
            label="Tokens"
            rows={all}
            rowKey={(one) => one.name}
            empty="There is no token."
            columns={[
              { name: "Token", cell: (one) => one.name },
              { name: "Role", cell: (one) => one.role },
              { name: "Machines", minor: true, cell: (one) => patterns(one.machines, one.capsules) },
              { name: "Capsules", minor: true, cell: (one) => patterns(one.capsules, one.machines) },
              { name: "Expires", cell: (one) => (one.expires_ms ? time(one.expires_ms) : "never") },
              { name: "Actions", unseen: true, kind: "wide", cell: (one) => <Revoke name={one.name} /> },
            ]}
          />
        )}
      </Loaded>
      {polled.data && (
        <p class="hint">{plural(polled.data.length, "token")}. The host stores only their digests.</p>
      )}
    </Section>
  );
}

function Revoke({ name }: { name: string }) {
  const revoke = async () => {
    const given = await ask({
      title: `Revoke the token ${name}`,
      text: "It is refused from the next request on, and what it has opened ends. Operations that it started go on.",
      button: "Revoke",
      danger: true,
    });
    if (given) await act(`Revoke ${name}`, "DELETE /v1/tokens/{name}", [name]);
  };
  return (
    <button type="button" class="quiet-danger" aria-label={`Revoke ${name}`} onClick={() => void revoke()}>
      Revoke
    </button>
  );
}

async function createToken(): Promise<NewToken | undefined> {
  const given = await ask({
    title: "Create a token",
    fields: [
      { name: "name", label: "Name" },
      {
        name: "role",
        label: "Role",
        kind: "choice",
        value: "viewer",
        choices: [
          { value: "viewer", label: "viewer: looks" },
          { value: "operator", label: "operator: also runs and changes machines" },
          { value: "admin", label: "admin: everything" },
        ],
      },
      {
        name: "machines",
        label: "Machines",
        optional: true,
        hint: "Patterns like ci-*, with commas; empty: all.",
      },
      { name: "hours", label: "Hours until it expires", kind: "number", optional: true },
    ],
    button: "Create",
  });
  if (!given) return undefined;
  const machines = given.machines ? { machines: given.machines.split(",").map((one) => one.trim()) } : {};
  const expires = given.hours ? { expires_s: 3600 * Number(given.hours) } : {};
  return act<NewToken>(`Token ${given.name}`, "POST /v1/tokens", [], {
    name: given.name,
    role: given.role,
    ...machines,
    ...expires,
  });
}
