//! Home end of a tunnel: tap devices on the bridges of a machine that runs on another host.
//!
//! A record says that the machine is away; tap devices exist only while the other host is connected. They are
//! created for every connection, so a bridge never sends frames to a host that is gone, and learns the
//! machine's place again from the announcements that follow.

use super::{Tunnels, lock, protocol::Open, records::HomeRecord, refused, transport::WireTransport};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::record::{Phase, Record},
};
use std::sync::Arc;
use whimbrel_api::{DiskInfo, MachineInfo, MachineState, NicInfo, TunnelInfo};
use whimbrel_core::{ByteSize, DiskConfig, HostName, MachineConfig, MachineName, NicConfig, error_chain};
use whimbrel_migrate::protocol::TunnelId;
use whimbrel_net::{
    Mac, NetError, PortFilter, TapConfig,
    tunnel::{MacTable, Relay, Socket},
};
use whimbrel_wire::{Connection, Refusal};

/// Name pattern of tap devices; the kernel replaces `%d` by a number.
const TAP: &str = "wmh%d";

pub(super) struct HomeEnd {
    record: HomeRecord,
    open: Option<OpenHome>,
}

struct OpenHome {
    relay: Arc<Relay>,
    peer: usize,
}

impl HomeEnd {
    pub(super) fn closed(record: HomeRecord) -> Self {
        Self { record, open: None }
    }

    fn tunnel_info(&self, here: &HostName) -> TunnelInfo {
        let away = Some(self.record.away.clone());
        TunnelInfo { home: here.clone(), away, connected: self.open.is_some(), reason: None }
    }
}

impl Tunnels {
    /// Records that the machine is away, with its network here.
    pub(crate) fn start_home(
        &self,
        id: TunnelId,
        name: &MachineName,
        config: &MachineConfig,
        away: &HostName,
    ) -> Result<(), DaemonError> {
        let mut homes = lock(&self.homes);
        if homes.contains_key(&id) {
            return Ok(());
        }
        let (name, config, away) = (name.clone(), config.clone(), away.clone());
        let note = HomeRecord { id, name, config, away, since_ms: crate::now_ms() };
        self.records.put_home(&note)?;
        homes.insert(id, HomeEnd::closed(note));
        Ok(())
    }

    /// Removes a home end for good: the machine is back or gone.
    pub(crate) fn end(&self, id: TunnelId) {
        let ended = lock(&self.homes).remove(&id);
        if ended.is_some() {
            self.records.remove_home(id);
        }
    }

    /// Removes the home end of a machine that runs here after all, as the daemon died before the handover.
    pub(crate) fn end_unused(&self, name: &MachineName, config: &MachineConfig) {
        self.end_where(|note| note.name == *name && note.config == *config);
    }

    /// Removes every home end of the machine called `name`. Returns whether there was one.
    pub(crate) fn end_of(&self, name: &MachineName) -> bool {
        self.end_where(|note| note.name == *name)
    }

    fn end_where(&self, is_so: impl Fn(&HomeRecord) -> bool) -> bool {
        let homes = lock(&self.homes);
        let ids: Vec<_> = homes.iter().filter(|(_, end)| is_so(&end.record)).map(|(id, _)| *id).collect();
        drop(homes);
        ids.iter().for_each(|id| self.end(*id));
        !ids.is_empty()
    }

    pub(super) fn open_home_of(&self, id: &TunnelId, peer: usize) -> Option<Arc<Relay>> {
        let homes = lock(&self.homes);
        let open = homes.get(id)?.open.as_ref().filter(|open| open.peer == peer)?;
        Some(open.relay.clone())
    }

    pub(super) fn close_homes_of(&self, peer: usize) {
        let mut homes = lock(&self.homes);
        for end in homes.values_mut().filter(|end| end.open.as_ref().is_some_and(|open| open.peer == peer)) {
            tracing::info!(machine = %end.record.name, away = %end.record.away, "a tunnel lost its connection");
            end.open = None;
        }
    }
}

impl Daemon {
    /// Opens the home end of a tunnel for the host called `away`.
    pub(super) fn open_home(
        &self,
        open: &Open,
        away: &HostName,
        connection: Connection,
    ) -> Result<(), Refusal> {
        self.claim_home(open, away)?;
        let peer = super::address_of(connection.peer());
        let mut homes = lock(&self.tunnels.homes);
        let end = homes.get_mut(&open.id).ok_or_else(|| refused("the machine has come home meanwhile"))?;
        if end.record.away != *away {
            end.record.away = away.clone();
            self.tunnels.records.put_home(&end.record).map_err(|error| refused(&error.to_string()))?;
        }
        // Tap devices of a dead connection that is not closed yet would keep frames from the new ones.
        end.open = None;
        let relay = connect_bridges(&end.record.config, |nic| self.port_filter(&end.record.name, nic))
            .map_err(|error| {
                tracing::error!(error = &error as &dyn std::error::Error, "cannot open a tunnel here");
                refused(&error_chain(&error))
            })?;
        let runtime = self.runtime.clone();
        relay.set_transport(Some(Box::new(WireTransport {
            id: open.id,
            connection: connection.clone(),
            runtime,
        })));
        end.open = Some(OpenHome { relay: Arc::new(relay), peer });
        tracing::info!(machine = %end.record.name, %away, "a tunnel is open");
        drop(homes);
        if connection.close_reason().is_some() {
            // The connection ended before the home end was open.
            self.tunnels.close_homes_of(peer);
        }
        Ok(())
    }

    /// Starts a tunnel that is unknown here, if its machine is here as the capsule that was resumed there.
    fn claim_home(&self, open: &Open, away: &HostName) -> Result<(), Refusal> {
        if lock(&self.tunnels.homes).contains_key(&open.id) {
            return Ok(());
        }
        let strange = || refused("this is not the home of that machine");
        let capsule = open.capsule.ok_or_else(strange)?;
        let machine = self.machines.get(&open.name).map_err(|_| strange())?;
        let turn = machine.try_lock_in_any_phase("tunnel", None);
        let turn = turn.map_err(|error| refused(&error.to_string()).retryable())?;
        match &turn.record.phase {
            Phase::Suspended { capsule: lies } if *lies == capsule => {}
            Phase::Given { to, capsule: lies } if *lies == capsule && to == away => {}
            phase => return Err(refused(&format!("{} is {} here", open.name, phase.name()))),
        }
        let begun = self.tunnels.start_home(open.id, &open.name, &turn.record.config, away);
        begun.map_err(|error| refused(&error.to_string()))
    }

    /// Ends the tunnels of a machine that starts here with its network.
    pub(crate) fn end_tunnels_of(&self, record: &mut Record) {
        if self.away_tunnel(record).is_none() {
            record.tunnel.take().into_iter().for_each(|tunnel| self.tunnels.end(tunnel.id));
            let (name, ports) = (&record.name, &record.config.nics);
            self.tunnels.end_where(|note| note.name == *name && note.config.nics == *ports);
        }
    }

    pub(crate) fn add_away(&self, infos: &mut Vec<MachineInfo>) {
        for end in lock(&self.tunnels.homes).values() {
            let tunnel = end.tunnel_info(&self.name);
            let suspended = |info: &&mut MachineInfo| {
                let resting = matches!(info.state, MachineState::Suspended | MachineState::HandedOff { .. });
                info.name == end.record.name && resting && info.tunnel.is_none()
            };
            match infos.iter_mut().find(suspended) {
                Some(info) => info.tunnel = Some(tunnel),
                None => infos.push(describe(&end.record, tunnel)),
            }
        }
        infos.sort_by(|a, b| a.name.cmp(&b.name));
    }
}

fn connect_bridges(
    config: &MachineConfig,
    filter: impl Fn(&NicConfig) -> PortFilter,
) -> Result<Relay, NetError> {
    let socket = |nic: &NicConfig| {
        let bridge = nic.bridge.clone()?;
        Some(Socket::tap(&TapConfig { name: TAP.to_owned(), bridge: Some(bridge) }, filter(nic)))
    };
    let sockets = config.nics.iter().map(|nic| socket(nic).transpose()).collect::<Result<_, _>>()?;
    let stations = config.nics.iter().filter_map(|nic| mac_of(&nic.mac));
    Relay::start(sockets, Some(MacTable::new(stations)))
}

pub(crate) fn mac_of(text: &str) -> Option<Mac> {
    let bytes: Result<Vec<u8>, _> = text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect();
    Some(Mac(bytes.ok()?.try_into().ok()?))
}

fn describe(note: &HomeRecord, tunnel: TunnelInfo) -> MachineInfo {
    let HomeRecord { name, config, since_ms, .. } = note;
    let disk = |(index, disk): (usize, &DiskConfig)| {
        let (base, cdrom) = ("away".to_owned(), config.cdroms.has(index));
        DiskInfo { size: disk.size, base, owned: ByteSize(0), cdrom }
    };
    let nic = |nic: &NicConfig| {
        let (mac, bridge) = (nic.mac.clone(), nic.bridge.clone());
        NicInfo { mac, bridge, addresses: Vec::new() }
    };
    MachineInfo {
        name: name.clone(),
        state: MachineState::Remote,
        memory: config.memory,
        cpus: config.cpus,
        accel: config.accel,
        disks: config.disks.iter().enumerate().map(disk).collect(),
        nics: config.nics.iter().map(nic).collect(),
        pid: None,
        process: None,
        since_ms: *since_ms,
        origin: None,
        follows: None,
        operation: None,
        vmgenid: None,
        tunnel: Some(tunnel),
        protection: None,
        taken_over: None,
        uploads: None,
        settings: whimbrel_api::MachineSettings::default(),
        display: false,
        restarts: None,
        failed_care: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(mac: &str) -> MachineConfig {
        let nics = vec![NicConfig { mac: mac.to_owned(), bridge: Some("br0".to_owned()) }];
        MachineConfig { nics, ..MachineConfig::minimal(ByteSize(1 << 20)) }
    }

    #[test]
    fn a_machine_stays_away_across_restarts_until_it_itself_is_back() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Tunnels::open(dir.path().join("tunnels")).unwrap();
        let (id, name, away) = (TunnelId([1; 16]), "web".parse().unwrap(), "beta".parse().unwrap());
        open().start_home(id, &name, &config("52:54:00:00:00:01"), &away).unwrap();
        let again = open();
        again.end_unused(&name, &config("52:54:00:00:00:02"));
        assert_eq!(lock(&again.homes).len(), 1, "another machine of that name is not that machine");
        again.end_unused(&name, &config("52:54:00:00:00:01"));
        assert!(lock(&again.homes).is_empty() && lock(&open().homes).is_empty());
        assert!(!open().end_of(&name));
    }

    #[test]
    fn an_address_is_read_or_left_out() {
        assert_eq!(mac_of("52:54:00:ab:00:01"), Some(Mac([0x52, 0x54, 0, 0xab, 0, 1])));
        assert_eq!((mac_of(""), mac_of("52:54:00:ab:00"), mac_of("52:54:00:ab:00:zz")), (None, None, None));
    }
}
