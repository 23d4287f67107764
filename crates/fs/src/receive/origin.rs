//! Finds parents and clone sources among the subvolumes of this filesystem: by the UUID of the subvolume that they were
//! received from, or by their own UUID.

use ubtrfs_format::{KeyType, RootId};
use uuid::Uuid;

use super::error::ReceiveProblem;
use crate::{Error, Fs};

/// The role of a subvolume in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OriginRole {
    /// The parent of a snapshot.
    Parent,
    /// A source of clones.
    CloneSource,
}

impl Fs {
    /// Finds the subvolume that a stream identifies by UUID and transid: a subvolume with this received UUID; if no
    /// subvolume has it, the subvolume that has the UUID itself.
    ///
    /// The subvolume must be read-only; a subvolume that becomes writable loses its received UUID. Of several
    /// subvolumes with the UUID, a subvolume with this transid is preferred. A subvolume with another transid is
    /// accepted too: if a received subvolume is sent again, the stream identifies it by its received UUID, but by the
    /// transid that it has at the second sender.
    pub(crate) fn find_origin(&self, uuid: Uuid, ctransid: u64, part: OriginRole) -> Result<RootId, ReceiveProblem> {
        let mut is_writable = false;
        for kind in [KeyType::UUID_KEY_RECEIVED_SUBVOL, KeyType::UUID_KEY_SUBVOL] {
            let mut usable = None;
            for id in self.ids_of_uuid(kind, uuid)? {
                let Some(item) = self.engine.root_item(id).map_err(Error::from)?.filter(|item| item.refs > 0) else {
                    continue;
                };
                if self.entered.is_deleted(id) {
                    continue;
                }
                let (its_uuid, transid) = match kind {
                    KeyType::UUID_KEY_SUBVOL => (item.uuid, item.ctransid),
                    _ => (item.received_uuid, item.stransid),
                };
                match its_uuid == uuid {
                    false => {}
                    true if !self.subvolume(id)?.is_read_only() => is_writable = true,
                    true if transid.0 == ctransid => return Ok(id),
                    true => usable = usable.or(Some(id)),
                }
            }
            if let Some(id) = usable {
                return Ok(id);
            }
        }
        Err(match (is_writable, part) {
            (true, _) => ReceiveProblem::Writable { uuid },
            (false, OriginRole::Parent) => ReceiveProblem::NoParent { uuid, ctransid },
            (false, OriginRole::CloneSource) => ReceiveProblem::NoCloneSource { uuid, ctransid },
        })
    }

    /// The subvolumes with a UUID, from the UUID tree. Without a UUID tree, all subvolumes are searched.
    fn ids_of_uuid(&self, kind: KeyType, uuid: Uuid) -> Result<Vec<RootId>, Error> {
        if uuid.is_nil() {
            return Ok(Vec::new());
        }
        if let Some(ids) = self.engine.subvolumes_of_uuid(kind, uuid)? {
            return Ok(ids);
        }
        let is_it = |info: &crate::SubvolumeInfo| match kind {
            KeyType::UUID_KEY_SUBVOL => info.uuid == uuid,
            _ => info.received_uuid == uuid,
        };
        Ok(self.subvolumes()?.into_iter().filter(is_it).map(|info| info.id).collect())
    }
}
