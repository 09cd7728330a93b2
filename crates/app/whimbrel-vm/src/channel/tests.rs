//! Hostile packets, and the end of a process.

use super::*;
use rustix::fs::{MemfdFlags, memfd_create};
use std::{fs::File, io::Read, process::Command};

const SOON: Duration = Duration::from_secs(20);

/// Two channels of this process with each other.
fn pair() -> (Channel, Channel, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&dir.path().join("swap")).unwrap();
    let there = Channel::connect(&dir.path().join("swap")).unwrap();
    (listener.accept(SOON).unwrap(), there, dir)
}

#[test]
fn descriptors_arrive_in_order_and_are_closed_on_exec() {
    let (here, there, _dir) = pair();
    let files: Vec<OwnedFd> = (0..MAX_DESCRIPTORS).map(|i| seal(&[i as u8]).unwrap()).collect();
    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    here.send(&vec![7; MAX_PACKET], &borrowed).unwrap();
    let packet = there.receive(SOON).unwrap();
    assert_eq!(packet.bytes, vec![7; MAX_PACKET]);
    for (index, file) in packet.descriptors.into_iter().enumerate() {
        assert!(rustix::io::fcntl_getfd(&file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        assert_eq!(unseal(file, 1).unwrap(), [index as u8]);
    }
}

#[test]
fn too_large_a_packet_is_neither_sent_nor_taken_in_part() {
    let (here, there, _dir) = pair();
    assert!(matches!(here.send(&vec![0; MAX_PACKET + 1], &[]), Err(ChannelError::TooLarge { .. })));
    let file = seal(b"x").unwrap();
    let many = vec![file.as_fd(); MAX_DESCRIPTORS + 1];
    assert!(matches!(here.send(b"x", &many), Err(ChannelError::TooLarge { .. })));
    rustix::net::send(&here.socket, &vec![0; MAX_PACKET + 100], SendFlags::empty()).unwrap();
    assert!(matches!(there.receive(SOON), Err(ChannelError::TooLarge { .. })));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let many = vec![file.as_fd(); 64];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&many)));
    sendmsg(&here.socket, &[IoSlice::new(b"x")], &mut ancillary, SendFlags::empty()).unwrap();
    assert!(matches!(there.receive(SOON), Err(ChannelError::TooLarge { .. })));
    here.send(b"fine", &[]).unwrap();
    assert_eq!(there.receive(SOON).unwrap().bytes, b"fine");
}

#[test]
fn a_file_that_the_sender_can_still_change_is_refused() {
    let mut open = File::from(memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap());
    io::Write::write_all(&mut open, b"abc").unwrap();
    unseal(open.into(), 3).unwrap_err();
    unseal(seal(b"abcd").unwrap(), 3).unwrap_err();
    assert_eq!(unseal(seal(b"abc").unwrap(), 3).unwrap(), b"abc");
}

#[test]
fn an_end_that_was_closed_is_not_the_end_of_the_process() {
    let (here, there, _dir) = pair();
    drop(there);
    let waited = Instant::now();
    let silent = here.receive(Duration::from_millis(60));
    assert!(matches!(silent, Err(ChannelError::Silent { .. })), "{silent:?}");
    assert!(waited.elapsed() >= Duration::from_millis(60));
    assert!(matches!(here.send(b"x", &[]), Err(ChannelError::Ended)));
}

#[test]
fn what_a_process_sent_before_its_end_comes_before_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("swap");
    let listener = Listener::bind(&path).unwrap();
    let script = "import socket,sys\ns=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n\
                  s.connect(sys.argv[1]); s.send(b'one'); s.send(b'two'); print('sent',flush=True); sys.stdin.read()";
    let mut child = Command::new("python3");
    child.args(["-c", script]).arg(&path);
    child.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = child.spawn().unwrap();
    let here = listener.accept(SOON).unwrap();
    assert_eq!(here.peer().pid(), child.id() as i32);
    child.stdout.take().unwrap().read_exact(&mut [0; 5]).unwrap();
    here.peer().kill().unwrap();
    assert!(here.peer().has_ended(SOON));
    assert_eq!(here.receive(SOON).unwrap().bytes, b"one");
    assert_eq!(here.receive(SOON).unwrap().bytes, b"two");
    assert!(matches!(here.receive(SOON), Err(ChannelError::Ended)));
    child.wait().unwrap();
}
