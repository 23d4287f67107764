//! Handles: numbers that stand for open objects.
//!
//! A program holds a pointer to a type that the header does not define, so the compiler tells the kinds of handles apart.
//! The pointer is a number that a table knows. Nothing reads memory through it.
//!
//! Invariants:
//! - H1. A number is given once in the life of a process, for all kinds together. So a closed handle, and a handle of
//!   another kind, is found.
//! - H2. An object that a call uses lives until the call ends, although another thread closes its handle.
//! - H3. Objects are dropped without the lock of their table, because that can take long and call the program.
//! - H4. Only the process that opened an object uses it. A process that was forked from it has the memory, but not the
//!   threads.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;
use rustix::io::Errno;

use crate::failure::{CallFailure, CallResult};

/// A kind of handle. The type that implements it is the one of the header.
pub trait HandleKind: Sized + 'static {
    /// The type of the object that a handle names.
    type Object: Send + Sync + 'static;
    /// The name in messages.
    const WHAT: &'static str;
    /// The open objects.
    fn table() -> &'static HandleTable<Self::Object>;
}

/// The open objects of a kind, each with the process that opened it (H4). Tools that look for leaks find the objects
/// through a tree, but not through a hash table.
#[derive(Debug)]
pub struct HandleTable<T>(RwLock<BTreeMap<usize, (u32, Arc<T>)>>);

impl<T> HandleTable<T> {
    pub(crate) const fn new() -> Self {
        Self(RwLock::new(BTreeMap::new()))
    }
}

/// A handle of a program: `ubtrfs_fs *`.
#[repr(transparent)]
#[derive(Debug)]
pub struct Handle<K>(*mut K);

impl<K> Clone for Handle<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Handle<K> {}

/// The next number. The first ones are no addresses that a program could hold by mistake.
static NEXT: AtomicUsize = AtomicUsize::new(0x1001);
/// The distance of two numbers. All are odd, so none is the address of a struct.
const STEP: usize = 2;

impl<K: HandleKind> Handle<K> {
    pub(crate) const NULL: Self = Self(ptr::null_mut());

    /// Makes the handle of an object.
    pub(crate) fn add(object: K::Object) -> CallResult<Self> {
        let number = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |number| number.checked_add(STEP));
        let number = number.map_err(|_last| CallFailure::new(Errno::NFILE, "no handle is left"))?;
        K::table().0.write().insert(number, (std::process::id(), Arc::new(object)));
        Ok(Self(ptr::without_provenance_mut(number)))
    }

    /// The object.
    pub(crate) fn get(self) -> CallResult<Arc<K::Object>> {
        match K::table().0.read().get(&self.0.addr()) {
            Some((process, object)) => check_process(*process).map(|()| Arc::clone(object)),
            None => Err(self.unknown()),
        }
    }

    /// Ends the handle, and returns the object.
    pub(crate) fn take(self) -> CallResult<Arc<K::Object>> {
        self.get()?;
        let found = K::table().0.write().remove(&self.0.addr());
        found.map(|(_, object)| object).ok_or_else(|| self.unknown())
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn unknown(self) -> CallFailure {
        if self.is_null() {
            return CallFailure::null(K::WHAT);
        }
        CallFailure::new(Errno::BADF, format!("{} is closed, or is another kind of handle", K::WHAT))
    }
}

/// H4
fn check_process(opened_by: u32) -> CallResult<()> {
    match opened_by == std::process::id() {
        true => Ok(()),
        false => Err(CallFailure::new(Errno::INVAL, "another process opened it, from which this one was forked")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One;
    struct Other;

    impl HandleKind for One {
        type Object = u32;
        const WHAT: &'static str = "one";
        fn table() -> &'static HandleTable<u32> {
            static TABLE: HandleTable<u32> = HandleTable::new();
            &TABLE
        }
    }

    impl HandleKind for Other {
        type Object = u32;
        const WHAT: &'static str = "other";
        fn table() -> &'static HandleTable<u32> {
            static TABLE: HandleTable<u32> = HandleTable::new();
            &TABLE
        }
    }

    #[test]
    fn closed_and_foreign_handles_are_found() {
        let one = Handle::<One>::add(1).unwrap();
        assert_eq!(*one.get().unwrap(), 1);
        assert_eq!(Handle::<Other>(one.0.cast()).get().unwrap_err().errno, Errno::BADF.raw_os_error());
        assert_eq!(Handle::<One>::NULL.get().unwrap_err().errno, Errno::INVAL.raw_os_error());
        assert_eq!(*one.take().unwrap(), 1);
        assert!(one.get().is_err() && one.take().is_err());
        let next = Handle::<One>::add(2).unwrap();
        assert!(next.0 != one.0 && one.get().is_err());
    }
}
