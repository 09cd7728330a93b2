// Managed networks, with the addresses of their machines and the ports of the host that lead to them.
import { may } from "../api";
import { ask } from "../dialog";
import { Facts, Head, Loaded, Section, Table } from "../parts";
import type { NetworkInfo } from "../schema";
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
          <button
            type="button"
            class="quiet-danger"
            aria-label={`Delete the network ${network.name}`}
            onClick={() => void remove(network.name)}
          >
            Delete
          </button>
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
    </Section>
  );
}
