//! Send: a read-only subvolume as a stream of commands, whole or as the difference to another snapshot.
//!
//! ```text
//! tree        inodes, names and paths of a read-only subvolume on disk
//! moves       names that change, in an order in which no command meets a name in use
//! extents     the data of one file that changes
//! clones      where the receiver can clone an extent from
//! sent_parts  the parts of extents that were sent
//! sender      the commands of one subvolume: names, inodes, data, attributes
//! pipeline    reading data ahead, encoding, writing in order
//! changes     the changes between two snapshots, for people
//! request     the subvolumes to send, and their parent
//! ```
//!
//! [`ubtrfs_tree::Diff`] walks the difference of two trees. An incremental send walks this difference twice: once for
//! names, once for inodes. A subvolume is sent in its last committed state. While a subvolume is being sent, the
//! subvolume, its parent and its clone sources can neither be deleted nor become writable, and no extents are moved
//! ([`crate::subvolume::sends`]).

pub(crate) mod changes;
pub(crate) mod request;

mod clones;
mod extents;
mod moves;
mod pipeline;
mod sender;
mod sent_parts;
mod tree;
