//! A model of who waits for which link when many clients stripe their files over many benefactors.
//!
//! A client has a stream to each benefactor of its stripe. Chunks go to them in turn, as many under way as
//! the window takes, and the streams share the links of clients and benefactors as TCP would in the long run:
//! max-min fair. Two calls of every file (session, commit) are work of the manager, one at a time. There is
//! no disk, no processor and no loss in it: it says what the network allows.

/// What is modelled. Rates in bytes a second of content, sizes in bytes, times in seconds.
#[derive(Debug, Clone)]
pub(super) struct Setting {
    pub(super) clients: usize,
    pub(super) benefactors: usize,
    /// Of a client's link; infinite if nothing limits it.
    pub(super) client_rate: f64,
    pub(super) benefactor_rate: f64,
    pub(super) width: usize,
    pub(super) chunk: f64,
    pub(super) window: f64,
    pub(super) file: f64,
    /// Files of each client.
    pub(super) files: usize,
    /// What the manager does for a file, half before its first chunk and half after its last.
    pub(super) manager: f64,
    /// Between the start of one client and the next.
    pub(super) apart: f64,
}

/// What came out.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outcome {
    /// Bytes a second of all clients, from the first start to the last end.
    pub(super) mean: f64,
    /// Most bytes a second of all clients at any time.
    pub(super) peak: f64,
    /// Bytes a second of each client while it wrote.
    pub(super) each: Vec<f64>,
    /// Share of the time in which the manager had work.
    pub(super) manager: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// Does something else, or waits for the manager, until then.
    Until(f64),
    Streams,
    Done,
}

/// Chunks that wait for a benefactor, in bytes.
#[derive(Debug, Clone, Copy)]
struct Stream {
    benefactor: usize,
    queued: f64,
    rate: f64,
}

struct Client {
    phase: Phase,
    began: f64,
    ended: f64,
    files: usize,
    /// Bytes of the file that are in no stream yet.
    left: f64,
    turn: usize,
    streams: Vec<Stream>,
    after: bool,
}

/// Computes it.
pub(super) fn run(setting: &Setting) -> Outcome {
    World::new(setting).run()
}

struct World<'a> {
    setting: &'a Setting,
    clients: Vec<Client>,
    now: f64,
    /// When the manager has done all it was asked.
    free: f64,
    busy: f64,
    next_stripe: usize,
    peak: f64,
}

const NOTHING: f64 = 1e-3;

impl<'a> World<'a> {
    fn new(setting: &'a Setting) -> Self {
        let client = |number: usize| {
            let began = number as f64 * setting.apart;
            let phase = Phase::Until(began);
            Client {
                phase,
                began,
                ended: 0.0,
                files: 0,
                left: 0.0,
                turn: 0,
                streams: Vec::new(),
                after: true,
            }
        };
        let clients = (0..setting.clients).map(client).collect();
        Self { setting, clients, now: 0.0, free: 0.0, busy: 0.0, next_stripe: 0, peak: 0.0 }
    }

    fn run(mut self) -> Outcome {
        loop {
            self.turn_phases();
            self.share();
            let Some(step) = self.step() else { break };
            self.pass(step);
        }
        let bytes = self.setting.file * self.setting.files as f64;
        let each = self.clients.iter().map(|client| bytes / (client.ended - client.began)).collect();
        let mean = bytes * self.clients.len() as f64 / self.now;
        Outcome { mean, peak: self.peak, each, manager: self.busy / self.now }
    }

    /// When the manager has done a call that comes now.
    fn ask_manager(&mut self) -> f64 {
        let work = self.setting.manager / 2.0;
        self.free = self.free.max(self.now) + work;
        self.busy += work;
        self.free
    }

    fn turn_phases(&mut self) {
        for at in 0..self.clients.len() {
            match self.clients[at].phase {
                Phase::Until(time) if time <= self.now => self.go_on(at),
                Phase::Streams => self.fill(at),
                Phase::Until(_) | Phase::Done => {}
            }
        }
    }

    /// What a client does when it need not wait any more: its first chunk, the next file, or nothing.
    fn go_on(&mut self, at: usize) {
        if !self.clients[at].after {
            self.begin_streams(at);
            return;
        }
        if self.clients[at].files == self.setting.files {
            self.clients[at].ended = self.now;
            self.clients[at].phase = Phase::Done;
            return;
        }
        let ready = self.ask_manager();
        let client = &mut self.clients[at];
        (client.after, client.phase) = (false, Phase::Until(ready));
    }

    fn begin_streams(&mut self, at: usize) {
        let (width, members) = (self.setting.width.min(self.setting.benefactors), self.setting.benefactors);
        let first = self.next_stripe;
        self.next_stripe = (first + width) % members;
        let stream = |number| Stream { benefactor: (first + number) % members, queued: 0.0, rate: 0.0 };
        let client = &mut self.clients[at];
        client.streams = (0..width).map(stream).collect();
        (client.left, client.turn, client.phase) = (self.setting.file, 0, Phase::Streams);
        self.fill(at);
    }

    /// Puts chunks into the window, each to the next benefactor; a client whose last chunk is stored asks for
    /// the commit.
    fn fill(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let under_way: f64 = client.streams.iter().map(|stream| stream.queued).sum();
        let mut room = self.setting.window - under_way;
        let lane = (self.setting.window / client.streams.len() as f64).max(self.setting.chunk);
        while client.left > NOTHING {
            let chunk = self.setting.chunk.min(client.left);
            let stream = client.turn % client.streams.len();
            if room < chunk || client.streams[stream].queued + chunk > lane + NOTHING {
                break;
            }
            client.streams[stream].queued += chunk;
            client.turn += 1;
            client.left -= chunk;
            room -= chunk;
        }
        if client.left <= NOTHING && client.streams.iter().all(|stream| stream.queued <= NOTHING) {
            client.files += 1;
            let done = self.ask_manager();
            let client = &mut self.clients[at];
            client.streams.clear();
            (client.after, client.phase) = (true, Phase::Until(done));
        }
    }

    /// Max-min fair rates: the link that gives its streams least is settled first, then the rest share what
    /// is left.
    fn share(&mut self) {
        let members = self.setting.benefactors;
        let mut left: Vec<f64> = vec![self.setting.benefactor_rate; members];
        left.extend(vec![self.setting.client_rate; self.clients.len()]);
        let mut open = vec![0_usize; left.len()];
        let mut streams = Vec::new();
        for (client, of) in self.clients.iter_mut().enumerate() {
            for (number, stream) in of.streams.iter_mut().enumerate() {
                stream.rate = 0.0;
                if stream.queued > NOTHING {
                    open[stream.benefactor] += 1;
                    open[members + client] += 1;
                    streams.push((client, number, stream.benefactor));
                }
            }
        }
        let mut total = 0.0;
        while !streams.is_empty() {
            let each = |link: usize| left[link] / open[link] as f64;
            let links = (0..left.len()).filter(|link| open[*link] > 0);
            let Some(tight) = links.min_by(|a, b| each(*a).total_cmp(&each(*b))) else { break };
            let rate = each(tight);
            streams.retain(|&(client, number, benefactor)| {
                let through = benefactor == tight || members + client == tight;
                if through {
                    self.clients[client].streams[number].rate = rate;
                    total += rate;
                    for link in [benefactor, members + client] {
                        left[link] = (left[link] - rate).max(0.0);
                        open[link] -= 1;
                    }
                }
                !through
            });
        }
        self.peak = self.peak.max(total);
    }

    /// Until the next thing happens: a chunk is through, or somebody's waiting is over. None if nothing will.
    fn step(&self) -> Option<f64> {
        let mut next: Option<f64> = None;
        let mut soonest = |time: f64| next = Some(next.map_or(time, |other| other.min(time)));
        for client in &self.clients {
            match client.phase {
                Phase::Until(time) => soonest((time - self.now).max(0.0)),
                Phase::Streams => {
                    for stream in client.streams.iter().filter(|stream| stream.rate > 0.0) {
                        // The chunk at the head: what is over a whole number of chunks.
                        let over = stream.queued % self.setting.chunk;
                        let head = if over > NOTHING { over } else { self.setting.chunk };
                        soonest(head.min(stream.queued) / stream.rate);
                    }
                }
                Phase::Done => {}
            }
        }
        next
    }

    fn pass(&mut self, step: f64) {
        self.now += step;
        for stream in self.clients.iter_mut().flat_map(|client| &mut client.streams) {
            stream.queued = (stream.queued - stream.rate * step).max(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;

    fn setting() -> Setting {
        Setting {
            clients: 1,
            benefactors: 8,
            client_rate: 100.0 * MB,
            benefactor_rate: 10.0 * MB,
            width: 4,
            chunk: MB,
            window: 64.0 * MB,
            file: 400.0 * MB,
            files: 2,
            manager: 0.0,
            apart: 0.0,
        }
    }

    fn near(found: f64, wanted: f64) {
        assert!((found / wanted - 1.0).abs() < 0.02, "{found}, not {wanted}");
    }

    #[test]
    fn a_stripe_is_as_fast_as_its_benefactors_or_its_client() {
        near(run(&setting()).mean, 40.0 * MB);
        near(run(&Setting { width: 1, ..setting() }).mean, 10.0 * MB);
        near(run(&Setting { client_rate: 25.0 * MB, ..setting() }).mean, 25.0 * MB);
    }

    #[test]
    fn clients_share_what_both_use_and_none_gets_less() {
        let outcome = run(&Setting { clients: 4, width: 8, ..setting() });
        near(outcome.mean, 80.0 * MB);
        outcome.each.iter().for_each(|each| near(*each, 20.0 * MB));
    }

    #[test]
    fn a_manager_that_is_slow_is_what_small_files_wait_for() {
        let setting = Setting { clients: 8, file: MB, files: 100, manager: 1.0, ..setting() };
        let outcome = run(&setting);
        near(outcome.mean, MB);
        near(outcome.manager, 1.0);
    }

    #[test]
    fn clients_that_start_later_end_later() {
        let outcome = run(&Setting { clients: 2, apart: 1000.0, ..setting() });
        near(outcome.mean, 1600.0 * MB / 1020.0);
        near(outcome.peak, 40.0 * MB);
    }
}
