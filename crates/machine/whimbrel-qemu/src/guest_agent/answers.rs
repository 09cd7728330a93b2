//! Answers of qemu-ga, read leniently and kept within bounds. Pure.

use super::{QemuGaError, message::printable};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::Value;
use std::net::IpAddr;

/// Most network interfaces of a guest that are kept, and addresses of each.
const INTERFACES_MAX: usize = 32;
const ADDRESSES_MAX: usize = 16;
const NAME_MAX: usize = 32;

/// Network interface of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestInterface {
    /// Name in the guest.
    pub name: String,
    /// Hardware address, as the guest writes it.
    pub mac: Option<String>,
    /// Addresses, in the guest's order.
    pub addresses: Vec<IpAddr>,
}

/// State of a program that was started in a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecStatus {
    /// Whether it has ended.
    pub exited: bool,
    /// Exit code, if it ended by itself.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// What it printed to its standard output.
    pub stdout: Vec<u8>,
    /// What it printed to its standard error.
    pub stderr: Vec<u8>,
    /// Whether output is missing.
    pub truncated: bool,
}

/// A part of a file of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileChunk {
    /// Bytes of the part.
    pub bytes: Vec<u8>,
    /// Whether the file ends here.
    pub end: bool,
}

/// Interfaces in the answer to `guest-network-get-interfaces`.
pub(super) fn interfaces(answer: &Value) -> Vec<GuestInterface> {
    let interface = |interface: &Value| {
        let address = |address: &Value| address["ip-address"].as_str()?.parse().ok();
        let addresses = interface["ip-addresses"].as_array().into_iter().flatten();
        Some(GuestInterface {
            name: printable(interface["name"].as_str()?, NAME_MAX),
            mac: interface["hardware-address"].as_str().map(|mac| printable(mac, NAME_MAX)),
            addresses: addresses.filter_map(address).take(ADDRESSES_MAX).collect(),
        })
    };
    let all = answer.as_array().into_iter().flatten();
    all.filter_map(interface).take(INTERFACES_MAX).collect()
}

/// The answer to `guest-exec-status`.
pub(super) fn exec_status(answer: &Value) -> Result<ExecStatus, QemuGaError> {
    let malformed = || QemuGaError::Malformed { command: "guest-exec-status" };
    let number = |name: &str| answer[name].as_i64().and_then(|number| i32::try_from(number).ok());
    let bytes = |name: &str| match &answer[name] {
        Value::Null => Some(Vec::new()),
        Value::String(text) => STANDARD.decode(text).ok(),
        _ => None,
    };
    let is_true = |name: &str| answer[name].as_bool() == Some(true);
    Ok(ExecStatus {
        exited: answer["exited"].as_bool().ok_or_else(malformed)?,
        exit_code: number("exitcode"),
        signal: number("signal"),
        stdout: bytes("out-data").ok_or_else(malformed)?,
        stderr: bytes("err-data").ok_or_else(malformed)?,
        truncated: is_true("out-truncated") || is_true("err-truncated"),
    })
}

/// The answer to `guest-file-read` of at most `max` bytes.
pub(super) fn file_chunk(answer: &Value, max: usize) -> Result<FileChunk, QemuGaError> {
    let malformed = || QemuGaError::Malformed { command: "guest-file-read" };
    let bytes = STANDARD.decode(answer["buf-b64"].as_str().unwrap_or_default()).map_err(|_| malformed())?;
    let end = answer["eof"].as_bool().ok_or_else(malformed)?;
    if bytes.len() > max || (bytes.is_empty() && !end) {
        return Err(malformed());
    }
    Ok(FileChunk { bytes, end })
}

/// Bytes in the text form that qemu-ga takes.
pub(super) fn encoded(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_guest_with_a_thousand_interfaces_is_cut_to_what_is_kept() {
        let address = json!({"ip-address": "10.0.0.2", "ip-address-type": "ipv4", "prefix": 24});
        let bad = json!({"ip-address": "not one"});
        let one = json!({"name": "eth0\u{7}".repeat(50), "hardware-address": "52:54:00:00:00:01",
            "ip-addresses": ([vec![address; 100], vec![bad; 5]].concat())});
        let found = interfaces(&Value::Array(vec![one; 1000]));
        assert_eq!((found.len(), found[0].addresses.len()), (INTERFACES_MAX, ADDRESSES_MAX));
        assert!(found[0].name.len() <= NAME_MAX && !found[0].name.contains('\u{7}'));
        assert_eq!(interfaces(&json!({"name": 7})), []);
        assert_eq!(interfaces(&json!([{"name": 7}, null, [], {"ip-addresses": []}])), []);
    }

    #[test]
    fn the_end_of_a_program_is_read_and_nonsense_is_refused() {
        let status = json!({"exited": true, "exitcode": 3, "out-data": "aGk=", "err-truncated": true});
        let status = exec_status(&status).unwrap();
        assert_eq!((status.exit_code, &*status.stdout, status.truncated), (Some(3), &b"hi"[..], true));
        assert!(!exec_status(&json!({"exited": false})).unwrap().exited);
        for wrong in [
            json!(null),
            json!({"exited": 1}),
            json!({"exited": true, "out-data": "?"}),
            json!({"exited": true, "err-data": 7}),
        ] {
            assert!(exec_status(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_chunk_is_no_longer_than_what_was_asked_for_and_never_empty_before_the_end() {
        let chunk = json!({"count": 2, "buf-b64": "aGk=", "eof": true});
        assert_eq!(file_chunk(&chunk, 2).unwrap(), FileChunk { bytes: b"hi".to_vec(), end: true });
        assert!(file_chunk(&chunk, 1).is_err());
        assert!(file_chunk(&json!({"buf-b64": "", "eof": false}), 9).is_err(), "it would never end");
        assert!(file_chunk(&json!({"buf-b64": "aGk="}), 9).is_err());
    }
}
