//! Stubs: the directories of subvolumes on which submounts are mounted (`submounts`).

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use ubtrfs_format::RootId;
use ubtrfs_fs::{Attr, Error, InodeId, Result};

use super::{Done, RequestFailure, Server};
use crate::attr::{wire_attr, wire_statx};
use crate::protocol::{EntryReply, FuseRequest, Operation, Reply};
use crate::submounts::{self, LOOKUP_PATIENCE, NameUse, PATIENCE, Submounts};
use crate::transport::WorkerPlace;

/// The stubs of a view that the kernel knows, with the references that it holds (I6 of `submounts`).
#[derive(Debug, Default)]
pub(super) struct KnownStubs {
    references: Mutex<HashMap<RootId, u64>>,
}

impl KnownStubs {
    /// Adds a reference, and returns whether there was one.
    fn add(&self, stub: RootId) -> bool {
        let mut references = self.references.lock();
        let count = references.entry(stub).or_default();
        *count += 1;
        *count > 1
    }

    fn forget(&self, stub: RootId, count: u64) {
        let mut references = self.references.lock();
        if let Some(left) = references.get_mut(&stub) {
            *left = left.saturating_sub(count);
            if *left == 0 {
                references.remove(&stub);
            }
        }
    }
}

impl Server {
    /// The submounts, if an inode is a stub of this view.
    pub(super) fn submounts_at(&self, id: InodeId) -> Option<&Submounts> {
        self.submounts.as_deref().filter(|_| self.is_stub(id))
    }

    /// Whether an inode is a stub of this view.
    pub(super) fn is_stub(&self, id: InodeId) -> bool {
        self.submounts.is_some() && id.root != self.view.subvolume
    }

    pub(super) fn forget_stub(&self, id: InodeId, count: u64) {
        self.stubs.forget(id.root, count);
    }

    /// Answers the lookup of a stub (I1). The reference of `attr` is given back.
    pub(super) fn lookup_stub(
        &self,
        submounts: &Submounts,
        (req, name): (&FuseRequest<'_>, &[u8]),
        attr: &Attr,
        reply: &mut Reply<'_>,
        place: &WorkerPlace<'_>,
    ) -> Result<()> {
        self.fs.forget(attr.id, 1);
        let subvolume = attr.id.root;
        if name == b".." {
            // The way up from the root directory of a view leads out of the view.
            return Err(Error::Stale);
        }
        let was_known = self.stubs.add(subvolume);
        if was_known && !submounts.is_own(req.pid) {
            match submounts::name_use(req.pid) {
                NameUse::Remove => place.aside(|| submounts.leave(subvolume)),
                NameUse::Walk if !submounts.is_placed(subvolume) => {
                    place.aside(|| submounts.enter(subvolume, LOOKUP_PATIENCE));
                }
                NameUse::Walk | NameUse::Make => {}
            }
        }
        let ttl = submounts.stub_ttl(req.pid);
        reply.entry(&EntryReply { ttl, attr_ttl: Duration::ZERO, ..self.entry(attr) });
        Ok(())
    }

    /// Answers a request on a stub (I1, I3, I4).
    pub(super) fn answer_stub(
        &self,
        submounts: &Submounts,
        req: &FuseRequest<'_>,
        id: InodeId,
        reply: &mut Reply<'_>,
        place: &WorkerPlace<'_>,
    ) -> Done {
        match req.operation {
            Operation::Getattr | Operation::Statx
                if submounts.is_own(req.pid) || submounts::name_use(req.pid) != NameUse::Walk =>
            {
                let attr = self.fs.getattr(id)?;
                let wire = wire_attr(&attr, self.nodes.st_ino(id));
                match req.operation {
                    Operation::Statx => reply.statx(Duration::ZERO, &wire, wire_statx(&attr)),
                    _ => reply.attr(Duration::ZERO, &wire),
                }
                return Ok(());
            }
            // I4. The kernel asks for the ACL of a stub whose owner is not root. Nobody uses the ACL of a stub.
            Operation::Getxattr { .. } if submounts.is_own(req.pid) => {
                return Err(RequestFailure::Errno(Errno::NODATA));
            }
            _ if submounts.is_own(req.pid) => {}
            Operation::Getattr | Operation::Statx | Operation::Statfs | Operation::Getxattr { .. } => {
                place.aside(|| submounts.enter(id.root, PATIENCE));
            }
            _ => submounts.enter_later(id.root),
        }
        Err(RequestFailure::Errno(submounts.refusal(id.root)))
    }
}
