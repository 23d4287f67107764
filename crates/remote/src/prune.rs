//! Removes snapshots that no rule keeps, and parts that no manifest names.
//!
//! - D1. A snapshot stays if a snapshot that stays needs it, directly or through others.
//! - D2. The manifest of a snapshot is removed before its parts, and before the manifest of its parent. So a prune that
//!   ends early leaves no snapshot without its parts or its parent.
//! - D3. Nothing is removed if a manifest cannot be read, because it may need any snapshot.
//! - D4. Parts without a manifest may belong to a push that was interrupted and will be continued. They are removed only if
//!   they are old. A push that runs excludes a prune ([`crate::StoreMark`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use futures_util::{TryStreamExt, stream};
use uuid::Uuid;

use crate::Result;
use crate::error::RemoteError;
use crate::keys::RemoteKeys;
use crate::manifest::{PARTS, PartName, SnapshotKey, SnapshotManifest, manifest_object};
use crate::marks::StoreMark;
use crate::retention::KeepRules;
use crate::store::RemoteStore;

/// What a prune does with a snapshot.
#[derive(Clone, Debug)]
pub struct PruneDecision {
    /// The snapshot.
    pub manifest: SnapshotManifest,
    /// The rules that keep it.
    pub reasons: Vec<&'static str>,
    /// A snapshot that stays and needs it (D1).
    pub needed_by: Option<SnapshotKey>,
}

impl PruneDecision {
    /// Whether the snapshot stays.
    pub fn stays(&self) -> bool {
        !self.reasons.is_empty() || self.needed_by.is_some()
    }
}

/// Everything that a prune does.
#[derive(Clone, Debug, Default)]
pub struct PrunePlan {
    /// All snapshots, the newest first.
    pub decisions: Vec<PruneDecision>,
    /// Parts of pushes that did not end, and their bytes.
    pub orphans: Vec<(String, u64)>,
    /// Files of a directory that were being written when a push was killed. A list does not show them.
    unfinished: Vec<PathBuf>,
    /// Parts of snapshots that go.
    parts: Vec<String>,
    /// Bytes that become free.
    pub freed_bytes: u64,
}

impl PrunePlan {
    /// Number of parts of pushes that did not end.
    pub fn nr_orphans(&self) -> usize {
        self.orphans.len().saturating_add(self.unfinished.len())
    }
}

impl RemoteStore {
    /// Decides what a prune removes. `orphans_before` is the time, in seconds since 1970, before which parts without a
    /// manifest must have been written to be removed.
    ///
    /// # Errors
    ///
    /// The store cannot be read, or one of its manifests is damaged (D3).
    pub fn plan_prune(&self, keys: &RemoteKeys, rules: &KeepRules, orphans_before: i64) -> Result<PrunePlan> {
        // Listed before the manifests: a push that ends meanwhile has its manifest in the later list.
        let objects = self.part_objects(None)?;
        let found = self.snapshots()?;
        self.check_encryption(&found, keys)?;
        let manifests: Vec<SnapshotManifest> = self.manifests(&found, keys).into_iter().collect::<Result<_>>()?;
        let mut plan = PrunePlan { decisions: decide(manifests, rules), ..PrunePlan::default() };
        let decisions: HashMap<SnapshotKey, &PruneDecision> =
            plan.decisions.iter().map(|decision| (decision.manifest.key, decision)).collect();
        for object in objects {
            let Some((key, name)) = object.name.split_once('/') else { continue };
            let (Ok(key), Ok(name)) = (key.parse::<SnapshotKey>(), name.parse::<PartName>()) else { continue };
            let decision = decisions.get(&key);
            let part = decision.and_then(|decision| decision.manifest.parts.get(name.index));
            let is_named = part.is_some_and(|part| part.object(name.index) == name.to_string());
            let full = format!("{PARTS}/{}", object.name);
            match decision {
                Some(decision) if is_named && decision.stays() => continue,
                Some(_) if is_named => plan.parts.push(full),
                _ if object.modified < orphans_before => plan.orphans.push((full, object.bytes)),
                _ => continue,
            }
            plan.freed_bytes = plan.freed_bytes.saturating_add(object.bytes);
        }
        for (file, bytes) in self.unfinished_files(orphans_before) {
            plan.unfinished.push(file);
            plan.freed_bytes = plan.freed_bytes.saturating_add(bytes);
        }
        Ok(plan)
    }

    /// The files that crate object_store names `PART#NUMBER` while it writes them, if they are older than `before`.
    fn unfinished_files(&self, before: i64) -> Vec<(PathBuf, u64)> {
        let Some(parts) = self.objects.directory.as_ref().map(|directory| directory.join(PARTS)) else {
            return Vec::new();
        };
        let entries = |dir: &PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten();
        let snapshots = entries(&parts).map(|entry| entry.path());
        let mut found = Vec::new();
        for entry in snapshots.flat_map(|dir| entries(&dir).collect::<Vec<_>>()) {
            let name = entry.file_name();
            let is_part = |text: &str| text.split_once('#').is_some_and(|(part, _)| part.parse::<PartName>().is_ok());
            let Ok(meta) = entry.metadata() else { continue };
            let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let is_old = modified.is_some_and(|time| i64::try_from(time.as_secs()).is_ok_and(|sec| sec < before));
            if name.to_str().is_some_and(is_part) && meta.is_file() && is_old {
                found.push((entry.path(), meta.len()));
            }
        }
        found
    }

    /// Does what a plan says (D2), as long as the mark of this work counts.
    ///
    /// # Errors
    ///
    /// An object cannot be removed, or snapshots were pushed since the plan was made; [`RemoteError::Away`].
    pub fn prune(&self, mark: &StoreMark<'_>, plan: &PrunePlan, keys: &RemoteKeys) -> Result<()> {
        let known: HashSet<SnapshotKey> = plan.decisions.iter().map(|decision| decision.manifest.key).collect();
        if let Some(new) = self.snapshots()?.iter().find(|found| !known.contains(&found.key)) {
            let object = manifest_object(&new.key, new.is_encrypted);
            return Err(RemoteError::Keys { object, what: "was pushed meanwhile; prune again" });
        }
        let mut gone: BTreeMap<SnapshotKey, Option<SnapshotKey>> = plan
            .decisions
            .iter()
            .filter(|decision| !decision.stays())
            .map(|decision| (decision.manifest.key, decision.manifest.parent))
            .collect();
        while !gone.is_empty() {
            let parents: HashSet<SnapshotKey> = gone.values().flatten().copied().collect();
            let leaves: Vec<SnapshotKey> = gone.keys().filter(|key| !parents.contains(key)).copied().collect();
            // Only in a circle, each snapshot is a parent of another one.
            let leaves = if leaves.is_empty() { gone.keys().copied().collect() } else { leaves };
            for key in leaves {
                gone.remove(&key);
                mark.check()?;
                self.remove(&manifest_object(&key, keys.encrypts()))?;
            }
        }
        for file in &plan.unfinished {
            mark.check()?;
            let removed = std::fs::remove_file(file);
            removed.map_err(|source| RemoteError::Host { what: format!("remove {}", file.display()), source })?;
        }
        let objects = plan.parts.iter().chain(plan.orphans.iter().map(|(object, _)| object));
        let removals = stream::iter(objects.map(|object| mark.check().map(|()| self.objects.remove(object))));
        self.runtime.block_on(removals.try_buffer_unordered(REMOVALS_AT_ONCE).try_collect())
    }
}

/// Applies the rules to the snapshots of each subvolume.
fn decide(mut manifests: Vec<SnapshotManifest>, rules: &KeepRules) -> Vec<PruneDecision> {
    manifests.sort_by_key(|manifest| std::cmp::Reverse((manifest.created, manifest.generation, manifest.key)));
    let groups = groups(&manifests);
    let mut decisions: Vec<PruneDecision> = manifests
        .into_iter()
        .map(|manifest| PruneDecision { manifest, reasons: Vec::new(), needed_by: None })
        .collect();
    for members in groups {
        let times: Vec<i64> = members.iter().map(|at| decisions[*at].manifest.created.sec).collect();
        for (at, reasons) in members.iter().zip(rules.reasons(&times)) {
            decisions[*at].reasons = reasons;
        }
    }
    let places: HashMap<SnapshotKey, usize> =
        decisions.iter().enumerate().map(|(at, decision)| (decision.manifest.key, at)).collect();
    for at in 0..decisions.len() {
        if decisions[at].reasons.is_empty() {
            continue;
        }
        let (by, mut parent) = (decisions[at].manifest.key, decisions[at].manifest.parent);
        while let Some(next) = parent.and_then(|parent| places.get(&parent)) {
            let decision = &mut decisions[*next];
            // Its parents are marked too.
            if decision.needed_by.is_some() {
                break;
            }
            decision.needed_by = Some(by);
            parent = decision.manifest.parent;
        }
    }
    decisions
}

/// Groups the snapshots of one subvolume: those of the same source, and those that are connected by parents. The members
/// of a group keep their order.
fn groups(manifests: &[SnapshotManifest]) -> Vec<Vec<usize>> {
    fn root(of: &mut [usize], mut at: usize) -> usize {
        while of[at] != at {
            of[at] = of[of[at]];
            at = of[at];
        }
        at
    }
    let mut of: Vec<usize> = (0..manifests.len()).collect();
    let places: HashMap<SnapshotKey, usize> = manifests.iter().enumerate().map(|(at, it)| (it.key, at)).collect();
    let mut sources: HashMap<Uuid, usize> = HashMap::new();
    for (at, manifest) in manifests.iter().enumerate() {
        let same = manifest.source.map(|source| *sources.entry(source).or_insert(at));
        let parent = manifest.parent.and_then(|parent| places.get(&parent).copied());
        for other in same.into_iter().chain(parent) {
            let (one, other) = (root(&mut of, at), root(&mut of, other));
            of[one] = other;
        }
    }
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for at in 0..manifests.len() {
        groups.entry(root(&mut of, at)).or_default().push(at);
    }
    groups.into_values().collect()
}

const REMOVALS_AT_ONCE: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::SnapshotTime;
    use crate::manifest::tests::{key, manifest};

    fn snapshot(nr: u128, parent: Option<u128>, source: u128) -> SnapshotManifest {
        let created = SnapshotTime { sec: i64::try_from(nr).unwrap() * 86_400, nsec: 0 };
        let source = Some(Uuid::from_u128(source));
        SnapshotManifest { key: key(nr), parent: parent.map(key), source, created, ..manifest() }
    }

    fn kept(manifests: Vec<SnapshotManifest>, rules: &KeepRules) -> Vec<(SnapshotKey, bool)> {
        let kept = decide(manifests, rules).into_iter().filter(PruneDecision::stays);
        kept.map(|decision| (decision.manifest.key, decision.needed_by.is_some())).collect()
    }

    #[test]
    fn parents_of_kept_snapshots_stay() {
        let last = KeepRules { last: 1, ..KeepRules::default() };
        let chain = vec![snapshot(1, None, 9), snapshot(2, Some(1), 9), snapshot(3, None, 9), snapshot(4, Some(3), 9)];
        assert_eq!(kept(chain.clone(), &last), [(key(4), false), (key(3), true)]);
        // A snapshot of another subvolume has its own last one.
        let mut two = chain;
        two.push(snapshot(5, None, 8));
        assert_eq!(kept(two, &last), [(key(5), false), (key(4), false), (key(3), true)]);
        // Received snapshots have different sources, but are connected by parents.
        let received = vec![snapshot(1, None, 1), snapshot(2, Some(1), 2), snapshot(3, Some(2), 3)];
        assert_eq!(kept(received, &last), [(key(3), false), (key(2), true), (key(1), true)]);
        assert!(kept(vec![snapshot(1, None, 1)], &KeepRules::default()).is_empty());
    }

    #[test]
    fn circles_end() {
        let last = KeepRules { last: 1, ..KeepRules::default() };
        assert_eq!(kept(vec![snapshot(1, Some(2), 1), snapshot(2, Some(1), 1)], &last).len(), 2);
    }
}
