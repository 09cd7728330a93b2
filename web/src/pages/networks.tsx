// Managed networks, with the addresses of their machines and the ports of the host that lead to them.
import { may } from "../api";
import { ask } from "../dialog";
import { Facts, Head, Loaded, Section, Table } from "../parts";
import type { NetworkHost, NetworkInfo } from "../schema";
import { act, usePoll } from "../state";

async function create(): Promise<void> {
  const given = await ask({
    title: "Create a network",
    text: "A bridge with addresses, names and a way out for machines of this host.",
    fields: [
      { name: "name", label: "Name" },
      {
        name: "subnet",
        label: "IPv4 subnet",
        optional: true,
        hint: "Like 10.90.0.0/24; without one a free subnet is chosen.",
      },
      { name: "isolated", label: "Machines reach nothing but each other and the host", kind: "check" },
    ],
    button: "Create",
  });
  if (!given) return;
  const body = {
    name: given.name,
    isolated: given.isolated === "yes",
    ...(given.subnet ? { subnet: given.subnet } : {}),
  };
  await act(`Network ${given.name}`, "POST /v1/networks", [], body);
}

async function remove(name: string): Promise<void> {
  const given = await ask({
    title: `Delete the network ${name}`,
    text: "Its bridge and its addresses are gone. It is refused while a machine uses it.",
    button: "Delete",
    danger: true,
  });
  if (given) await act(`Delete ${name}`, "DELETE /v1/networks/{name}", [name]);
}

async function share(network: string): Promise<void> {
  const given = await ask({
    title: `Share ${network}`,
    text: `Machines of both hosts are neighbours then. The other host needs a network ${network}, and must share it with this one.`,
    fields: [{ name: "host", label: "Trusted host" }],
    button: "Share",
  });
  if (!given) return;
  await act(`Share ${network}`, "POST /v1/networks/{name}/hosts", [network], { share: [given.host] });
}

async function unshare(network: string, host: string): Promise<void> {
  const given = await ask({
    title: `Share ${network} with ${host} no longer`,
    text: `Machines of this host and of ${host} reach each other no longer.`,
    button: "Unshare",
    danger: true,
  });
  if (!given) return;
  await act(`Unshare ${network}`, "POST /v1/networks/{name}/hosts", [network], { unshare: [host] });
}

export function Networks() {
  const polled = usePoll<NetworkInfo[]>("GET /v1/networks", [], 5000);
  return (
    <>
      <Head title="Networks">
        {may("POST /v1/networks") && (
          <button type="button" onClick={() => void create()}>
            Create a network
          </button>
        )}
      </Head>
      <Loaded polled={polled}>
        {(all) =>
          all.length ? (
            all.map((one) => <Network key={one.name} network={one} />)
          ) : (
            <p class="empty">This host has no managed network.</p>
          )
        }
      </Loaded>
    </>
  );
}

function Network({ network }: { network: NetworkInfo }) {
  const ports = (machine: string) =>
    network.ports
      .filter((port) => port.machine === machine)
      .map((port) => `${port.port} → ${port.guest_port}/${port.protocol}`)
      .join(", ");
  return (
    <Section
      title={network.name}
      tools={
        may("DELETE /v1/networks/{name}") && (
          <>
            <button
              type="button"
              aria-label={`Share the network ${network.name}`}
              onClick={() => void share(network.name)}
            >
              Share
            </button>
            <button
              type="button"
              class="quiet-danger"
              aria-label={`Delete the network ${network.name}`}
              onClick={() => void remove(network.name)}
            >
              Delete
            </button>
          </>
        )
      }
    >
      {network.problem && <p class="notice bad">{network.problem}</p>}
      <Facts
        facts={[
          ["IPv4", network.subnet],
          ["IPv6", network.subnet6],
          ["Gateway", network.gateway],
          ["Way out", network.isolated ? "none: isolated" : "through this host"],
        ]}
      />
      <Table
        label={`Machines in ${network.name}`}
        rows={network.machines}
        rowKey={(one) => one.mac}
        empty="No machine uses it."
        columns={[
          { name: "Machine", cell: (one) => <a href={`#/machines/${one.machine}`}>{one.machine}</a> },
          { name: "Address", cell: (one) => <code>{one.address}</code> },
          { name: "Hardware address", minor: true, cell: (one) => <code>{one.mac}</code> },
          { name: "Published", kind: "wide", cell: (one) => ports(one.machine) },
        ]}
      />
      {network.hosts && network.hosts.length > 0 && <Hosts network={network.name} hosts={network.hosts} />}
    </Section>
  );
}

function Hosts({ network, hosts }: { network: string; hosts: NetworkHost[] }) {
  return (
    <Table
      label={`Hosts that share ${network}`}
      rows={hosts}
      rowKey={(one) => one.host}
      empty=""
      columns={[
        { name: "Shared with", cell: (one) => one.host },
        {
          name: "State",
          kind: "wide",
          cell: (one) => (one.joined ? "joined" : (one.reason ?? "connecting")),
        },
        {
          name: "Its machines",
          kind: "wide",
          cell: (one) => one.machines.map(({ machine, address }) => `${machine} ${address}`).join(", "),
        },
        {
          name: "",
          cell: (one) =>
            may("POST /v1/networks/{name}/hosts") && (
              <button
                type="button"
                aria-label={`Share ${network} with ${one.host} no longer`}
                onClick={() => void unshare(network, one.host)}
              >
                Unshare
              </button>
            ),
        },
      ]}
    />
  );
}
