//! Memory that a program gives back with `ubtrfs_free`.
//!
//! Invariants:
//! - M1. A table knows every block. So memory that is no block, or was freed before, is found.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_void};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::border::{Address, OwnedAddress};
use crate::failure::{CallFailure, CallResult, c_text};

/// A block, which owns what the program reads.
enum MemoryBlock {
    /// Bytes, and a zero byte after them.
    Bytes(#[allow(dead_code, reason = "kept for the program")] Box<[u8]>),
    /// Structs, and what they point to.
    Structs(#[allow(dead_code, reason = "kept for the program")] Box<dyn Send>),
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

/// Texts that structs of a block point to. They stay in their places when this is moved.
#[derive(Debug, Default)]
pub(crate) struct KeptTexts(Vec<CString>);

impl KeptTexts {
    /// Keeps a text, and returns its address.
    pub(crate) fn keep(&mut self, text: impl Into<Vec<u8>>) -> Address<c_char> {
        let text = c_text(text);
        let address = Address::of(text.as_ptr());
        self.0.push(text);
        address
    }

    /// Keeps a text that may be missing; its address is null then.
    pub(crate) fn keep_optional(&mut self, text: Option<impl Into<Vec<u8>>>) -> Address<c_char> {
        text.map_or(Address::NULL, |text| self.keep(text))
    }
}

/// Keeps an array of structs for the program, with the texts and arrays that they point to.
pub(crate) fn give_list<T: Send + 'static>(mut list: Vec<T>, owned: impl Send + 'static) -> OwnedAddress<T> {
    if list.is_empty() {
        // It has no memory that an address could name.
        return OwnedAddress::NULL;
    }
    let address = list.as_mut_ptr();
    BLOCKS.lock().insert(address.addr(), MemoryBlock::Structs(Box::new((list, owned))));
    OwnedAddress::of(address)
}

/// Keeps a struct for the program, as [`give_list`].
pub(crate) fn give_struct<T: Send + 'static>(value: T, owned: impl Send + 'static) -> OwnedAddress<T> {
    give_list(vec![value], owned)
}

/// Frees a block.
pub(crate) fn free(block: OwnedAddress<c_void>) -> CallResult<()> {
    let found = BLOCKS.lock().remove(&block.number());
    found
        .map(drop)
        .ok_or_else(|| CallFailure::new(Errno::INVAL, "the memory is not from this library, or freed already"))
}
