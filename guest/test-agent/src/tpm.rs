//! TPM 2.0 of the guest, by commands of the TPM library specification (part 3) through the kernel's device.
//!
//! One value is volatile, register 16, which any program may extend; one outlives the guest, an index in
//! non-volatile memory.

use std::{
    fs::OpenOptions,
    io::{self, Read, Write},
};

const DEVICE: &str = "/dev/tpm0";
const RESPONSE_MAX: usize = 4096;
/// Head of each response: tag, size, code.
const HEAD: usize = 10;

const WITH_SESSION: u16 = 0x8002;
const WITHOUT_SESSION: u16 = 0x8001;
const PCR_EXTEND: u32 = 0x182;
const PCR_READ: u32 = 0x17e;
const NV_DEFINE: u32 = 0x12a;
const NV_WRITE: u32 = 0x137;
const NV_READ: u32 = 0x14e;

const OWNER: [u8; 4] = 0x4000_0001u32.to_be_bytes();
const REGISTER: [u8; 4] = 16u32.to_be_bytes();
const INDEX: [u8; 4] = 0x0150_0000u32.to_be_bytes();
const SHA256: [u8; 2] = 0x000bu16.to_be_bytes();
/// Length of a value in non-volatile memory.
const VALUE: [u8; 2] = 8u16.to_be_bytes();
/// The owner and who knows the index's empty password may read and write; no lockout.
const ATTRIBUTES: [u8; 4] = 0x0206_0006u32.to_be_bytes();
/// Authorisation by an empty password, after its length.
const PASSWORD: [u8; 13] = [0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0];

/// Extends the register by `value` and stores it.
pub(crate) fn set(value: u64) -> io::Result<()> {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&value.to_be_bytes());
    let one = 1u32.to_be_bytes();
    command(WITH_SESSION, PCR_EXTEND, &[&REGISTER, &PASSWORD, &one, &SHA256, &digest])?;
    if stored()?.is_none() {
        let public: [&[u8]; 6] = [&[0, 14], &INDEX, &SHA256, &ATTRIBUTES, &[0, 0], &VALUE];
        command(WITH_SESSION, NV_DEFINE, &[&OWNER, &PASSWORD, &[0, 0], &public.concat()])?;
    }
    let value = value.to_be_bytes();
    command(WITH_SESSION, NV_WRITE, &[&OWNER, &INDEX, &PASSWORD, &VALUE, &value, &[0, 0]]).map(drop)
}

/// The register, and the stored value if there is one.
pub(crate) fn describe() -> io::Result<String> {
    let selection: [u8; 10] = [0, 0, 0, 1, SHA256[0], SHA256[1], 3, 0, 0, 1];
    let answer = command(WITHOUT_SESSION, PCR_READ, &[&selection])?;
    let register: String = answer.iter().rev().take(32).rev().map(|byte| format!("{byte:02x}")).collect();
    let stored = stored()?.map_or("none".to_owned(), |value| value.to_string());
    Ok(format!("register={register} stored={stored}"))
}

fn stored() -> io::Result<Option<u64>> {
    let answer = send(WITH_SESSION, NV_READ, &[&OWNER, &INDEX, &PASSWORD, &VALUE, &[0, 0]])?;
    // Length of the parameters, length of the value.
    let value = answer.1.get(6..14).and_then(|value| value.try_into().ok());
    Ok(value.filter(|_| answer.0 == 0).map(u64::from_be_bytes))
}

/// Response to a command that must succeed.
fn command(tag: u16, code: u32, parts: &[&[u8]]) -> io::Result<Vec<u8>> {
    match send(tag, code, parts)? {
        (0, answer) => Ok(answer),
        (error, _) => Err(io::Error::other(format!("command-{code:x}-fails-with-{error:x}"))),
    }
}

fn send(tag: u16, code: u32, parts: &[&[u8]]) -> io::Result<(u32, Vec<u8>)> {
    let body = parts.concat();
    let mut bytes = tag.to_be_bytes().to_vec();
    bytes.extend(((HEAD + body.len()) as u32).to_be_bytes());
    bytes.extend(code.to_be_bytes());
    bytes.extend(body);
    let mut device = OpenOptions::new().read(true).write(true).open(DEVICE)?;
    device.write_all(&bytes)?;
    let mut answer = vec![0; RESPONSE_MAX];
    let len = device.read(&mut answer)?;
    answer.truncate(len);
    let code = answer.get(6..HEAD).and_then(|code| code.try_into().ok());
    let code = code.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    Ok((u32::from_be_bytes(code), answer.split_off(HEAD)))
}
