//! The parents that a snapshot needs.

use std::collections::HashSet;

use crate::Result;
use crate::error::RemoteError;
use crate::manifest::{SnapshotKey, SnapshotManifest};

/// Returns the snapshots that must be received for `target`, the oldest first: `target`, its parent, and so on up to one
/// that is complete, or whose parent the destination has.
///
/// `read` returns a manifest of the store, or `None`; `is_here` tells whether the destination has a snapshot.
///
/// # Errors
///
/// A parent is not in the store, a manifest cannot be read, or the parents form a circle.
pub fn chain_of(
    target: SnapshotManifest,
    mut read: impl FnMut(&SnapshotKey) -> Result<Option<SnapshotManifest>>,
    is_here: impl Fn(&SnapshotKey) -> bool,
) -> Result<Vec<SnapshotManifest>> {
    if is_here(&target.key) {
        return Ok(Vec::new());
    }
    let mut seen = HashSet::from([target.key]);
    let mut chain = vec![target];
    while let Some((child, parent)) = chain.last().and_then(|last| Some((last.key, last.parent?))) {
        if is_here(&parent) {
            break;
        }
        if !seen.insert(parent) {
            return Err(RemoteError::Circle(parent));
        }
        chain.push(read(&parent)?.ok_or(RemoteError::NoParent { child, parent })?);
    }
    chain.reverse();
    Ok(chain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::tests::{key, manifest};

    /// A snapshot whose parent has the next number.
    fn snapshot(nr: u128, parent: Option<u128>) -> SnapshotManifest {
        SnapshotManifest { key: key(nr), parent: parent.map(key), ..manifest() }
    }

    #[test]
    fn a_chain_ends_at_what_the_destination_has() {
        let read = |wanted: &SnapshotKey| {
            let all = [snapshot(1, Some(2)), snapshot(2, Some(3)), snapshot(3, None), snapshot(5, Some(6))];
            Ok(all.into_iter().find(|found| found.key == *wanted))
        };
        let keys = |here: &[u128]| {
            let here: Vec<SnapshotKey> = here.iter().map(|nr| key(*nr)).collect();
            chain_of(snapshot(1, Some(2)), read, |key| here.contains(key))
                .unwrap()
                .iter()
                .map(|it| it.key)
                .collect::<Vec<_>>()
        };
        let none: Vec<SnapshotKey> = Vec::new();
        assert_eq!(keys(&[]), [key(3), key(2), key(1)]);
        assert_eq!(keys(&[3]), [key(2), key(1)]);
        assert_eq!(keys(&[2]), [key(1)]);
        assert_eq!(keys(&[1]), none);
        let missing = chain_of(snapshot(5, Some(6)), read, |_| false);
        assert!(matches!(missing, Err(RemoteError::NoParent { .. })));
        let circle = chain_of(snapshot(8, Some(9)), |_| Ok(Some(snapshot(9, Some(8)))), |_| false);
        assert!(matches!(circle, Err(RemoteError::Circle(_))));
    }
}
