//! Making a subvolume or a snapshot.

use ubtrfs_error::Result;
use ubtrfs_format::Generation;

use crate::engine::Engine;
use crate::handle::root_change::{NewSubvolume, RootChange};
use crate::handle::trans_handle::MetadataReservation;

impl Engine {
    /// Makes a subvolume in a commit. `plan` gets the generation of the running transaction, and returns the
    /// description of the subvolume.
    ///
    /// The caller keeps the directory of the new name locked, and puts nothing into that directory during the call.
    ///
    /// # Errors
    ///
    /// As for [`Engine::commit`].
    pub fn make_subvolume(
        &self,
        reservation: MetadataReservation<'_>,
        plan: impl FnOnce(Generation) -> NewSubvolume,
    ) -> Result<()> {
        self.check_not_held()?;
        {
            let _gate = self.running.enter();
            let transid = self.generation();
            self.running.request(RootChange::Make(Box::new(plan(transid))));
        }
        let committed = self.commit();
        // Drop the reservation after the commit, which puts the reserved changes.
        drop(reservation);
        committed
    }
}
