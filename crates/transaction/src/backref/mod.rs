//! Backrefs: from an extent to its references (`refs`), to the subvolumes that reach it (`roots`), and to the inodes
//! that use it (`inodes`); whether it is shared (`shared`).
//!
//! This code reads only immutable nodes, from given roots: the roots of the last commit, or of a running commit.

pub(crate) mod inodes;
pub(crate) mod refs;
pub(crate) mod roots;
pub(crate) mod shared;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod view;
