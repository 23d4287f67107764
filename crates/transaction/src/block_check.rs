//! The check that blocks pass after reading and before writing.

use ubtrfs_format::node::{NodeView, verify_csum};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{Corrupt, CsumType, FormatError, Generation, Key, Logical};

#[derive(Clone, Debug, Default)]
pub(crate) struct CheckContext {
    pub(crate) csum_type: CsumType,
    pub(crate) bytenr: Option<Logical>,
    pub(crate) level: Option<u8>,
    pub(crate) generation: Option<Generation>,
    pub(crate) first_key: Option<Key>,
    pub(crate) verify_csum: bool,
}

impl CheckContext {
    pub(crate) fn for_filesystem(superblock: &Superblock) -> Self {
        Self { csum_type: superblock.csum_type().unwrap_or_default(), ..Self::default() }
    }
}

pub(crate) fn check_node(raw: &[u8], context: &CheckContext) -> Result<(), Corrupt> {
    if context.verify_csum {
        verify_csum(raw, context.csum_type)?;
    }
    let view = NodeView::new(raw)?;
    let value =
        |field, value| FormatError::Value { what: "tree block", field, value, expected: "expected its parent's" };
    if context.bytenr.is_some_and(|bytenr| bytenr != view.bytenr()) {
        return Err(value("bytenr", view.bytenr().0).into());
    }
    if context.level.is_some_and(|level| level != view.level()) {
        return Err(value("level", view.level().into()).into());
    }
    if context.generation.is_some_and(|generation| generation != view.generation()) {
        return Err(value("generation", view.generation().0).into());
    }
    Ok(())
}
