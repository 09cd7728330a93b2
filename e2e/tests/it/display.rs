//! Screens of machines: pictures, keys and who may look, with a viewer of our own that speaks RFB (RFC 6143).
//! The viewer of browsers is noVNC (`web.rs`).

use crate::protect::{end_qemu, wait_epochs};
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console, wait_reborn};
use whimbrel_testkit::guest::{CheckResult, assert_same_life};

/// Keys by their X11 names: Control_L, Alt_L, Delete.
const CTRL_ALT_DELETE: [u32; 3] = [0xffe3, 0xffe9, 0xffff];
/// Points of a blinking cursor, and some more.
const BLINKING: usize = 400;

/// The first words of the screen of `web` at an address for viewers.
const LOOK: &str = "whimbrel display web --listen 127.0.0.1:5950 & shows=$!
    for turn in $(seq 300); do
        bash -c 'exec 3<>/dev/tcp/127.0.0.1/5950 && head -c 12 <&3' && break
        sleep 0.1
    done
    kill $shows && wait $shows";

/// What a screen shows, in 32 bits a point.
#[derive(Debug, PartialEq, Eq)]
struct Picture {
    width: usize,
    height: usize,
    points: Vec<[u8; 4]>,
}

impl Picture {
    /// Points that differ; none if the size does.
    fn differing(&self, other: &Self) -> Option<usize> {
        let pairs = self.points.iter().zip(&other.points);
        ((self.width, self.height) == (other.width, other.height))
            .then(|| pairs.filter(|(one, two)| one != two).count())
    }

    fn is_blank(&self) -> bool {
        self.points.iter().all(|point| point == &self.points[0])
    }
}

/// A viewer that has said hello.
struct Viewer {
    stream: UnixStream,
    width: usize,
    height: usize,
}

fn take<const N: usize>(stream: &mut UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).expect("bytes of the screen");
    bytes
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]))
}

impl Viewer {
    /// Opens the screen of a machine by the API of its host.
    fn open(host: &HostProcess, machine: &str) -> Self {
        let mut stream = UnixStream::connect(host.socket()).expect("the daemon's socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let path = format!("/v1/machines/{machine}/display");
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: host\r\nconnection: upgrade\r\nupgrade: whimbrel-display\r\n\r\n"
        )
        .expect("a request");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.extend(take::<1>(&mut stream));
        }
        assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
        assert_eq!(&take::<12>(&mut stream), b"RFB 003.008\n");
        stream.write_all(b"RFB 003.008\n").expect("a version");
        let [kinds] = take::<1>(&mut stream);
        let mut security = vec![0; kinds.into()];
        stream.read_exact(&mut security).expect("kinds of security");
        assert!(security.contains(&1), "it asks for a password: {security:?}");
        // Without a password, and shared with other viewers.
        stream.write_all(&[1]).expect("a choice");
        assert_eq!(take::<4>(&mut stream), [0; 4], "it refuses");
        stream.write_all(&[1]).expect("a wish to share");
        let server = take::<24>(&mut stream);
        let name = u32::from_be_bytes(server[20..24].try_into().expect("four bytes"));
        stream.read_exact(&mut vec![0; name as usize]).expect("a name");
        assert_eq!((server[4], server[7]), (32, 1), "bits of a point, and whether they are colours");
        Self { stream, width: u16_at(&server, 0), height: u16_at(&server, 2) }
    }

    /// The whole screen, as it is now.
    fn picture(&mut self) -> Picture {
        let (width, height) = (self.width, self.height);
        let size = [(width as u16).to_be_bytes(), (height as u16).to_be_bytes()].concat();
        let ask = [&[2, 0, 0, 1, 0, 0, 0, 0][..], &[3, 0, 0, 0, 0, 0], &size].concat();
        self.stream.write_all(&ask).expect("a request for all of it");
        let mut points = vec![[0; 4]; width * height];
        let mut drawn = 0;
        while drawn < points.len() {
            let [kind, _] = take::<2>(&mut self.stream);
            assert_eq!(kind, 0, "a message that is no part of the screen");
            for _ in 0..u16::from_be_bytes(take(&mut self.stream)) {
                let place = take::<12>(&mut self.stream);
                assert_eq!(&place[8..], [0; 4], "an encoding that was not asked for");
                let (x, y) = (u16_at(&place, 0), u16_at(&place, 2));
                for row in y..y + u16_at(&place, 6) {
                    for column in x..x + u16_at(&place, 4) {
                        let [blue, green, red, _] = take::<4>(&mut self.stream);
                        points[row * width + column] = [blue, green, red, 0];
                        drawn += 1;
                    }
                }
            }
        }
        Picture { width, height, points }
    }

    fn press(&mut self, keys: &[u32]) {
        let down = keys.iter().map(|key| (1, key));
        for (is_down, key) in down.chain(keys.iter().rev().map(|key| (0, key))) {
            let event = [&[4, is_down, 0, 0][..], &key.to_be_bytes()].concat();
            self.stream.write_all(&event).expect("a key");
        }
    }
}

/// The screen of a guest that is up, once it `is` as expected, or as it is after all patience. QEMU draws for
/// a viewer some time after it came: its first pictures may be blank.
fn shown(host: &HostProcess, machine: &str, is: impl Fn(&Picture) -> bool) -> Picture {
    console(host, machine).wait_ready(PATIENCE).expect("a guest that is up");
    let mut viewer = Viewer::open(host, machine);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let picture = viewer.picture();
        if is(&picture) || Instant::now() > deadline {
            return picture;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn assert_same_screen(before: &Picture, host: &HostProcess, machine: &str, when: &str) {
    let is_same = |now: &Picture| before.differing(now).is_some_and(|points| points < BLINKING);
    let now = shown(host, machine, is_same);
    let size = |picture: &Picture| (picture.width, picture.height);
    let differing = before.differing(&now);
    assert!(is_same(&now), "{when}: {:?} and {:?}, {differing:?} points differ", size(before), size(&now));
}

#[test]
fn a_desktop_shows_the_same_wherever_it_goes() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let arguments = ["--profile", "desktop"].map(str::to_owned).to_vec();
    Guest { address: None, arguments, ..Guest::small("web") }.run(&cluster, alpha);
    let first = shown(alpha, "web", |picture| !picture.is_blank());
    assert!(!first.is_blank(), "the firmware has drawn nothing");
    console(alpha, "web").write(50).expect("a first life");
    let born = console(alpha, "web").check().expect("an answer");
    assert!(matches!(born.ram, CheckResult::Good(_)), "{born:?}");
    let page = alpha.json(&["inspect", "web"]);
    assert_eq!(page["display"], true, "{page}");

    alpha.run(&["migrate", "web", "beta"]);
    assert_same_screen(&first, beta, "web", "after a migration");
    beta.run(&["suspend", "web"]);
    let refusal = beta.refuse(&["display", "web"]);
    assert!(refusal.text.contains("not running"), "{refusal:?}");
    beta.run(&["resume", "web"]);
    assert_same_screen(&first, beta, "web", "after a resume");
    beta.run(&["checkpoint", "web", "--tag", "early"]);
    beta.run(&["clone", "early", "--count", "1", "--prefix", "kid"]);
    assert_same_screen(&first, beta, "kid-1", "of a clone");
    beta.run(&["stop", "kid-1", "--kill"]);

    beta.run(&["protect", "web", "alpha", "--lease", "2s", "--witness", "gamma"]);
    wait_epochs(beta, 3);
    end_qemu(beta);
    alpha.wait_state("web", &["running"]);
    assert_same_screen(&first, alpha, "web", "after a takeover");
    assert_same_life(&born, &console(alpha, "web").check().expect("an answer"));
}

#[test]
fn keys_of_a_viewer_reach_the_guest_and_only_a_machine_with_a_screen_has_one() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, arguments: vec!["--display".to_owned()], ..Guest::small("web") }
        .run(&cluster, alpha);
    Guest { address: None, ..Guest::small("plain") }.run(&cluster, alpha);
    let refusal = alpha.refuse(&["display", "plain"]);
    assert!(
        refusal.text.contains("--display") && refusal.text.contains("whimbrel console plain"),
        "{refusal:?}"
    );
    let first = shown(alpha, "web", |picture| !picture.is_blank());
    assert!(!first.is_blank(), "the BIOS has written nothing");

    // The machine's own process has it when the daemon is killed; the next daemon finds the screen again.
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    let mut agent = console(alpha, "web");
    agent.wait_ready(PATIENCE).expect("a guest that is up");
    agent.write(50).expect("a first life");
    let born = agent.check().expect("an answer");
    let mut viewer = Viewer::open(alpha, "web");
    viewer.press(&CTRL_ALT_DELETE);
    wait_reborn(&mut agent, &born);
    assert!(!shown(alpha, "web", |picture| !picture.is_blank()).is_blank(), "the BIOS has written again");
    assert!(!viewer.picture().is_blank(), "a viewer lives through a reboot of the guest");

    // The verb opens the same to viewers on the host.
    let output = alpha.shell(LOOK, cluster.disk.path());
    assert_eq!(output.stdout, b"RFB 003.008\n", "{}", String::from_utf8_lossy(&output.stderr));
}
