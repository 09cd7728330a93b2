//! Network interfaces of the guest and their addresses.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    io,
    net::{Ipv4Addr, Ipv6Addr},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) index: i32,
    pub(crate) mac: [u8; 6],
    pub(crate) v4: Vec<Ipv4Addr>,
    pub(crate) v6: Vec<Ipv6Addr>,
}

#[derive(Default)]
struct Found {
    link: Option<(i32, [u8; 6])>,
    v4: Vec<Ipv4Addr>,
    v6: Vec<Ipv6Addr>,
}

/// All interfaces that are up, with their addresses.
pub(crate) fn all() -> io::Result<Vec<Interface>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call sets the pointer; the list is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found: BTreeMap<Vec<u8>, Found> = BTreeMap::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: `at` is a node of the list, which lives until it is freed.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        let up =
            entry.ifa_flags & libc::IFF_UP as u32 != 0 && entry.ifa_flags & libc::IFF_LOOPBACK as u32 == 0;
        if up && !entry.ifa_addr.is_null() {
            // SAFETY: the name of a node is a string that ends with zero.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_bytes().to_vec();
            record_address(found.entry(name).or_default(), entry.ifa_addr);
        }
    }
    // SAFETY: the list is from getifaddrs and is freed once; nothing refers to it any more.
    unsafe { libc::freeifaddrs(list) };
    let whole = |found: Found| {
        let (index, mac) = found.link?;
        Some(Interface { index, mac, v4: found.v4, v6: found.v6 })
    };
    Ok(found.into_values().filter_map(whole).collect())
}

fn record_address(found: &mut Found, address: *const libc::sockaddr) {
    // SAFETY: an address of the list begins with its family, and has the size of that family's type.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_PACKET => {
            // SAFETY: the address has this family. It may be unaligned for the larger type, hence the copy.
            let link = unsafe { address.cast::<libc::sockaddr_ll>().read_unaligned() };
            let mut mac = [0; 6];
            mac.copy_from_slice(&link.sll_addr[..6]);
            found.link = (link.sll_halen == 6).then_some((link.sll_ifindex, mac));
        }
        libc::AF_INET => {
            // SAFETY: the address has this family, as above.
            let inet = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            found.v4.push(Ipv4Addr::from(inet.sin_addr.s_addr.to_ne_bytes()));
        }
        libc::AF_INET6 => {
            // SAFETY: the address has this family, as above.
            let inet = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            found.v6.push(Ipv6Addr::from(inet.sin6_addr.s6_addr));
        }
        _ => {}
    }
}
