//! Backrefs: from an extent to its references, to the subvolumes that reach it, and to the inodes that use it.
//!
//! All of it reads immutable nodes from given roots: of the last commit, or of a commit that is under way.

pub(crate) mod inodes;
pub(crate) mod refs;
pub(crate) mod roots;
#[cfg(test)]
mod tests;
pub(crate) mod view;
