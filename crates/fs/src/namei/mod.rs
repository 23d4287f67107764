//! Names: looking up, listing directories, creating, linking, removing, renaming.

pub(crate) mod create;
pub(crate) mod dir_item;
pub(crate) mod known_names;
pub(crate) mod link;
pub(crate) mod lookup;
pub(crate) mod rename;
pub(crate) mod state;
