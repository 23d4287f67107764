//! Transaction handles: the changes that an operation may put, and the room that they need.
//!
//! - `trans_handle`, `running`: an operation, and the transaction that it belongs to.
//! - `admission`, `metadata_reservation`: granting the metadata space of an operation.
//! - `transaction_load`: counting the changes of a transaction, and estimating their need.
//! - `flush_progress`: the progress of a flush of delayed items.
//! - `quota_reservation`: space reserved for quota groups.
//! - `root_change`: changes of subvolumes that the commit makes.
//! - `refusal`: refused reservations, for tests.

pub(crate) mod admission;
pub(crate) mod flush_progress;
pub(crate) mod metadata_reservation;
pub(crate) mod quota_reservation;
#[cfg(debug_assertions)]
pub(crate) mod refusal;
pub(crate) mod root_change;
pub(crate) mod running;
pub(crate) mod trans_handle;
pub(crate) mod transaction_load;
