//! Balance: emptying block groups, and what the filesystem does for it: it ends writes in place, and waits for readers.

pub(crate) mod relocate;
