//! Checks that a filesystem found after a run of threads keeps the promises to each thread.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};

use super::snapshots::Snapshot;
use super::{MAX_WRITERS, POISON, REWRITTEN, REWRITTEN_LANE, Record, SNAPSHOT_LANE, VERSION_BITS};
use crate::history::ReadFound;
use crate::tree_entry::show;
use crate::{LANES, TreeEntry};

/// For each lane, the number of promises made before the cut.
pub(super) type Made = [Option<u64>; LANES];

impl Record {
    /// Checks the rules T1 to T4.
    pub(super) fn verify(&self, found: &[TreeEntry], read: ReadFound<'_>, made: &Made) -> Result<()> {
        let of_snapshots = made[SNAPSHOT_LANE].unwrap_or(0);
        let mut regions: BTreeMap<&str, Vec<TreeEntry>> = BTreeMap::new();
        for entry in found {
            let holder = self.snapshots.iter().filter(|snapshot| below(&entry.path, &snapshot.path).is_some());
            let place = holder.map(|snapshot| snapshot.path.as_str()).max_by_key(|path| path.len()).unwrap_or("");
            let path = below(&entry.path, place).unwrap_or_default().to_vec();
            regions.entry(place).or_default().push(TreeEntry { path, ..entry.clone() });
        }
        for snapshot in &self.snapshots {
            let is_there = regions.contains_key(snapshot.path.as_str());
            let must_be =
                snapshot.made <= of_snapshots && snapshot.deleted.is_none_or(|promise| promise > of_snapshots);
            ensure!(is_there || !must_be, "T2: {} is lost", snapshot.path);
            let must_not_be = snapshot.gone.is_some_and(|gone| gone <= of_snapshots);
            ensure!(!is_there || !must_not_be, "T2: {} was deleted and is back", snapshot.path);
        }
        for (place, entries) in &regions {
            let snapshot = self.snapshots.iter().find(|snapshot| snapshot.path == *place);
            let read = |path: &[u8]| read(&crate::tree_entry::join(place.as_bytes(), path));
            self.verify_region(entries, &read, made, snapshot).with_context(|| {
                if place.is_empty() { "outside of snapshots".to_owned() } else { format!("in {place}") }
            })?;
        }
        Ok(())
    }

    fn verify_region(
        &self,
        entries: &[TreeEntry],
        read: ReadFound<'_>,
        made: &Made,
        snapshot: Option<&Snapshot>,
    ) -> Result<()> {
        for (lane, history) in self.lanes.iter().enumerate() {
            let dir = format!("lane-{lane}");
            let of_lane: Vec<TreeEntry> = entries
                .iter()
                .filter_map(|entry| {
                    below(&entry.path, &dir).map(|path| TreeEntry { path: path.to_vec(), ..entry.clone() })
                })
                .collect();
            let read = |path: &[u8]| read(&crate::tree_entry::join(dir.as_bytes(), path));
            match snapshot {
                None => history.verify_among_others(&of_lane, &read, made[lane].unwrap_or(1) as usize),
                Some(snapshot) => {
                    let (from, to) = snapshot.states[lane];
                    history.verify_copy(&of_lane, &read, from..=to)
                }
            }
            .with_context(|| format!("T1: {dir}"))?;
        }
        self.verify_ballast(entries, snapshot)?;
        let promised = match snapshot {
            None => &self.versions[..(made[REWRITTEN_LANE].unwrap_or(0) as usize).min(self.versions.len())],
            Some(_) => &[],
        };
        verify_rewritten(read, promised)?;
        if self.scenario.poison {
            let poison =
                entries.iter().find(|entry| entry.path == b"poison").context("T4: the poisoned file is gone")?;
            let content = read(&poison.path)?;
            ensure!(!content.windows(POISON.len()).any(|window| window == POISON), "T4: the poison is on the device");
        }
        Ok(())
    }

    /// Checks that `entries` has all names of the directory `ballast`. Apart from these, `entries` may have only the
    /// scenario's other files and the content of the lanes. In a snapshot, the path of any other snapshot may exist
    /// too, as an empty directory.
    fn verify_ballast(&self, entries: &[TreeEntry], snapshot: Option<&Snapshot>) -> Result<()> {
        let mut expected: BTreeSet<Vec<u8>> =
            self.scenario.ballast_paths().iter().map(|path| format!("ballast/{path}").into_bytes()).collect();
        expected.insert(b"ballast".to_vec());
        let known = |path: &[u8]| {
            path.is_empty()
                || path == b"poison"
                || path == b"filler"
                || path.starts_with(b"lane-")
                || path.starts_with(b"rewritten")
                || (snapshot.is_some() && self.snapshots.iter().any(|snapshot| snapshot.path.as_bytes() == path))
        };
        for entry in entries {
            let is_expected = expected.remove(&entry.path) || known(&entry.path);
            ensure!(is_expected, "T2: {} was never there", show(&entry.path));
        }
        let lost: Vec<String> = expected.iter().take(5).map(|path| show(path)).collect();
        ensure!(expected.is_empty(), "T2: {} names of the ballast are lost: {lost:?}", expected.len());
        Ok(())
    }
}

/// Checks T3.
fn verify_rewritten(read: ReadFound<'_>, promised: &[(usize, [u64; MAX_WRITERS])]) -> Result<()> {
    for (index, file) in REWRITTEN.iter().enumerate() {
        let path = format!("rewritten/{}", file.name);
        let content = read(path.as_bytes())?;
        let last = promised.iter().rev().find(|(of, _)| *of == index).map(|(_, versions)| *versions);
        let least = last.unwrap_or_default();
        let is_there = content.len() == file.len || (content.len() < file.len && least == [0; MAX_WRITERS]);
        ensure!(
            is_there,
            "T3: {path} has {} bytes, and versions {least:?} of {} were fsynced",
            content.len(),
            file.len
        );
        for block in content.chunks(4096) {
            let mut words = block.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
            let first = words.next().unwrap_or(0);
            ensure!(words.all(|word| word == first), "T3: a block of {path} is of several versions");
            // The version in the file must not be older than the version that was promised to the writer.
            let (writer, version) = ((first >> VERSION_BITS) as usize, first & ((1 << VERSION_BITS) - 1));
            ensure!(
                least.get(writer).is_some_and(|least| version >= *least) && (first != 0 || least == [0; MAX_WRITERS]),
                "T3: {path} has version {version} of writer {writer}, and versions {least:?} were fsynced"
            );
        }
    }
    Ok(())
}

/// Returns `path` relative to `dir`, if `path` is `dir` or lies below it.
fn below<'p>(path: &'p [u8], dir: &str) -> Option<&'p [u8]> {
    if dir.is_empty() {
        return Some(path);
    }
    let rest = path.strip_prefix(dir.as_bytes())?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix(b"/") }
}
