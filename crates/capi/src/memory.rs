//! Memory that a program gives back with `ubtrfs_free`.
//!
//! Invariants:
//! - M1. A table knows every block. So memory that is no block, or was freed before, is found.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_void};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::border::{Address, OwnedAddress};
use crate::exports::subvolume::UbtrfsSubvolume;
use crate::failure::{CallFailure, CallResult};

/// A block, which owns what the program reads.
#[derive(Debug)]
enum MemoryBlock {
    /// Bytes, and a zero byte after them.
    Bytes(#[allow(dead_code, reason = "kept for the program")] Box<[u8]>),
    /// Descriptions of subvolumes, and the texts that they point to.
    Subvolumes(
        #[allow(dead_code, reason = "kept for the program")] Box<[UbtrfsSubvolume]>,
        #[allow(dead_code, reason = "kept for the program")] Vec<CString>,
    ),
}

/// The blocks, by their addresses.
static BLOCKS: Mutex<BTreeMap<usize, MemoryBlock>> = Mutex::new(BTreeMap::new());

/// Keeps bytes for the program, with a zero byte after them.
fn give(mut bytes: Vec<u8>) -> *mut u8 {
    bytes.push(0);
    let mut block = bytes.into_boxed_slice();
    let address = block.as_mut_ptr();
    BLOCKS.lock().insert(address.addr(), MemoryBlock::Bytes(block));
    address
}

/// Keeps bytes for the program.
pub(crate) fn give_bytes(bytes: Vec<u8>) -> OwnedAddress<c_void> {
    OwnedAddress::of(give(bytes).cast())
}

/// Keeps a text for the program.
pub(crate) fn give_text(text: Vec<u8>) -> OwnedAddress<c_char> {
    OwnedAddress::of(give(text).cast())
}

/// Keeps descriptions of subvolumes for the program. Each gets its path from `paths`.
pub(crate) fn give_subvolumes(mut list: Box<[UbtrfsSubvolume]>, paths: Vec<CString>) -> OwnedAddress<UbtrfsSubvolume> {
    for (subvolume, path) in list.iter_mut().zip(&paths) {
        subvolume.path = Address::of(path.as_ptr());
    }
    if list.is_empty() {
        // It has no memory that an address could name.
        return OwnedAddress::NULL;
    }
    let address = list.as_mut_ptr();
    BLOCKS.lock().insert(address.addr(), MemoryBlock::Subvolumes(list, paths));
    OwnedAddress::of(address)
}

/// Frees a block.
pub(crate) fn free(block: OwnedAddress<c_void>) -> CallResult<()> {
    let found = BLOCKS.lock().remove(&block.number());
    found
        .map(drop)
        .ok_or_else(|| CallFailure::new(Errno::INVAL, "the memory is not from this library, or freed already"))
}
