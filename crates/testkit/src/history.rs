//! Records the states and promises of a filesystem, and checks that a filesystem found after a fault or a power cut
//! keeps the promises.
//!
//! A `History` keeps the state after each step. The found filesystem must equal one of the states since the last sync
//! ([`History::verify`]). If a log was replayed, the found filesystem is a mix: one of the states at which something
//! was synced, plus everything that was fsynced since then:
//!
//! - H1. An fsynced file exists under a name that it had at the fsync or later, with content, mode and attributes that
//!   it had at the fsync or later. An fsynced file does not have a name that it had lost before the fsync. An fsynced
//!   directory has the entries that it had at the fsync, and no entry that it had lost before, apart from entries
//!   that changed later. If an fsynced file was removed later and is found nevertheless, the same holds for its content.
//! - H2. Each path is as it was in one of the states. Each block of a file's content is as it was in one state, old
//!   or new, because unsynced data reaches the disk in any order. A file that no commit promised may also be empty.
//! - H3. An inode that exists in every state is found under at least one of its names. A file has at most as many links
//!   as it had in the state with the most links: a rename neither loses a file nor leaves it under both names.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};

use crate::model::ROOT;
use crate::tree_entry::{join, show};
use crate::{Compare, Model, NodeKind, TreeEntry, compare_entries};

/// A state, and the entries that a walk of it finds.
#[derive(Debug)]
struct State {
    model: Model,
    entries: OnceLock<BTreeMap<Vec<u8>, (TreeEntry, u64)>>,
}

impl State {
    fn entries(&self) -> &BTreeMap<Vec<u8>, (TreeEntry, u64)> {
        self.entries.get_or_init(|| {
            let entries = self.model.entries_and_ids();
            entries.into_iter().map(|(entry, id)| (entry.path.clone(), (entry, id))).collect()
        })
    }

    fn id(&self, path: &[u8]) -> Option<u64> {
        self.entries().get(path).map(|(_, id)| *id)
    }

    fn has(&self, id: u64) -> bool {
        self.model.nodes.contains_key(&id)
    }
}

/// An acknowledged sync or fsync.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Promise {
    /// A sync of everything in the state with this number.
    Sync(usize),
    /// An fsync of the inode that had this path in the state with this number.
    Fsync(usize, Vec<u8>),
}

/// The states of a filesystem, and the promises made about them.
#[derive(Debug)]
pub struct History {
    states: Vec<State>,
    promises: Vec<Promise>,
    /// States besides the promised ones that a commit may have made durable. `None` means any state, because the times
    /// of commits are not known.
    commits: Option<BTreeSet<usize>>,
    /// Whether commits may have happened in the middle of steps, not only between them.
    within: bool,
}

impl History {
    /// Makes the history of a filesystem. Its first state is `model`, which is durable.
    pub fn new(model: Model) -> Self {
        let states = vec![State { model, entries: OnceLock::new() }];
        Self { states, promises: vec![Promise::Sync(0)], commits: None, within: false }
    }

    /// Declares that commits happen only at promises, so [`Self::verify`] accepts no state of any other commit.
    pub fn only_promises_commit(&mut self) {
        self.commits = Some(BTreeSet::new());
    }

    /// Declares that a commit may make the last state durable.
    pub fn may_commit(&mut self) {
        let last = self.last();
        if let Some(commits) = &mut self.commits {
            commits.insert(last);
        }
    }

    /// Declares that a commit may happen in the middle of the next step, so that parts of that step may be found.
    pub fn may_commit_within(&mut self) {
        self.within = true;
    }

    /// Adds the state after a step.
    pub fn push(&mut self, model: Model) {
        self.states.push(State { model, entries: OnceLock::new() });
    }

    /// Returns the number of the last state.
    pub fn last(&self) -> usize {
        self.states.len() - 1
    }

    /// Returns the last state.
    pub fn model(&self) -> &Model {
        &self.states[self.last()].model
    }

    /// Records that the last state was synced. Returns the number of promises.
    pub fn sync(&mut self) -> usize {
        self.promises.push(Promise::Sync(self.last()));
        self.promises.len()
    }

    /// Records that the inode that has the path `path` in the last state was fsynced. Returns the number of promises.
    pub fn fsync(&mut self, path: &[u8]) -> usize {
        self.promises.push(Promise::Fsync(self.last(), path.to_vec()));
        self.promises.len()
    }

    /// Returns the number of promises.
    pub fn promises(&self) -> usize {
        self.promises.len()
    }

    /// Returns the number of the state that promise number `promise` is about, or of the last state if that promise was
    /// never made.
    fn state_of(&self, promise: usize) -> usize {
        match self.promises.get(promise) {
            Some(Promise::Sync(state) | Promise::Fsync(state, _)) => *state,
            None => self.last(),
        }
    }

    /// Checks that the found filesystem keeps the first `made` promises, and that it contains nothing newer than the
    /// state of the next promise, which was in progress. `read` reads a whole file of the found filesystem. If `told`
    /// is set, a failure was reported, and changes that were not promised may be lost or present.
    pub fn verify(&self, found: &[TreeEntry], read: ReadFound<'_>, made: usize, told: bool) -> Result<()> {
        let made = made.min(self.promises.len());
        let promised = &self.promises[..made];
        let base = promised.iter().rev().find_map(|promise| match promise {
            Promise::Sync(state) => Some(*state),
            Promise::Fsync(..) => None,
        });
        let base = base.unwrap_or(0);
        let top = self.state_of(made);
        let fsyncs: Vec<(usize, &[u8])> = promised
            .iter()
            .filter_map(|promise| match promise {
                Promise::Fsync(state, path) if *state >= base => Some((*state, path.as_slice())),
                _ => None,
            })
            .collect();
        let newest = fsyncs.last().map_or(base, |(state, _)| *state);
        // The states that a commit may have captured. A mixed state consists of parts of these states.
        let mut candidates: BTreeSet<usize> = match &self.commits {
            None => (base..=top).collect(),
            Some(commits) => {
                let mut all: BTreeSet<usize> = commits.range(base..=top).copied().collect();
                all.extend(fsyncs.iter().map(|(state, _)| *state));
                all
            }
        };
        candidates.extend([base, top]);
        let mut best: Option<(usize, anyhow::Error)> = None;
        for &state in candidates.range(newest..) {
            let entries: Vec<TreeEntry> =
                self.states[state].entries().values().map(|(entry, _)| entry.clone()).collect();
            match compare_entries(&entries, found, Compare::MODEL) {
                Ok(()) => return Ok(()),
                Err(error) => {
                    // Report the error against the most similar state, which is the state with the shortest error. For
                    // this comparison, each missing path makes the error about 200 characters longer, so a state that
                    // differs only in content is more similar than a state with missing paths.
                    let len = error.to_string().replace(": only in the ", &"#".repeat(200)).len();
                    if best.as_ref().is_none_or(|(least, _)| len < *least) {
                        best = Some((len, error.context(format!("state {state} (first) and what is there (second)"))));
                    }
                }
            }
        }
        let composed = if fsyncs.is_empty()
            && !told
            && !self.within
            && !matches!(self.promises.get(made), Some(Promise::Fsync(..)))
        {
            Err(anyhow::anyhow!("nothing was fsynced since the last sync"))
        } else {
            self.verify_composed(found, read, &candidates, base..=top, &fsyncs)
        };
        composed.map_err(|why| match best {
            Some((_, error)) => anyhow::anyhow!("{why:#}\nno committed state either: {error:#}"),
            None => why,
        })
    }

    /// Works like [`History::verify`], for a filesystem on which other threads commit at any time: any state may be
    /// found, or a mix of parts of several states.
    pub(crate) fn verify_among_others(&self, found: &[TreeEntry], read: ReadFound<'_>, made: usize) -> Result<()> {
        let made = made.min(self.promises.len());
        let base = self.promises[..made].iter().rev().find_map(|promise| match promise {
            Promise::Sync(state) => Some(*state),
            Promise::Fsync(..) => None,
        });
        let base = base.unwrap_or(0);
        let fsyncs: Vec<(usize, &[u8])> = self.promises[..made]
            .iter()
            .filter_map(|promise| match promise {
                Promise::Fsync(state, path) if *state >= base => Some((*state, path.as_slice())),
                _ => None,
            })
            .collect();
        self.verify_window(found, read, base..=self.state_of(made), &fsyncs)
    }

    /// Checks a snapshot whose creation began in the first of the states `states` and ended in the last. The snapshot
    /// must not be older than the first of these states.
    pub(crate) fn verify_copy(
        &self,
        found: &[TreeEntry],
        read: ReadFound<'_>,
        states: RangeInclusive<usize>,
    ) -> Result<()> {
        let last = self.last();
        self.verify_window(found, read, (*states.start()).min(last)..=(*states.end()).min(last), &[])
    }

    fn verify_window(
        &self,
        found: &[TreeEntry],
        read: ReadFound<'_>,
        window: RangeInclusive<usize>,
        fsyncs: &[(usize, &[u8])],
    ) -> Result<()> {
        let candidates = window.clone().collect();
        self.verify_composed(found, read, &candidates, window.clone(), fsyncs)?;
        // H2 for mode and attributes: an operation changes the mode or an attribute as a whole.
        for entry in found.iter().filter(|entry| !entry.path.is_empty()) {
            let ids: BTreeSet<u64> = window.clone().filter_map(|state| self.states[state].id(&entry.path)).collect();
            let nodes: Vec<_> = window
                .clone()
                .flat_map(|state| ids.iter().filter_map(move |id| self.states[state].model.nodes.get(id)))
                .collect();
            let path = show(&entry.path);
            ensure!(nodes.iter().any(|node| node.mode == entry.mode), "H2: {path} has mode {:o}", entry.mode);
            ensure!(nodes.iter().any(|node| node.xattrs == entry.xattrs), "H2: {path} never had these attributes");
        }
        Ok(())
    }

    fn verify_composed(
        &self,
        found: &[TreeEntry],
        read: ReadFound<'_>,
        candidates: &BTreeSet<usize>,
        window: RangeInclusive<usize>,
        fsyncs: &[(usize, &[u8])],
    ) -> Result<()> {
        let (base, top) = (*window.start(), *window.end());
        let found: BTreeMap<&[u8], &TreeEntry> = found.iter().map(|entry| (entry.path.as_slice(), entry)).collect();
        for (state, path) in fsyncs {
            self.verify_fsync(&found, read, *state, path, top)?;
        }
        // H2.
        for (path, entry) in &found {
            let then: Vec<&(TreeEntry, u64)> =
                candidates.iter().filter_map(|&state| self.states[state].entries().get(*path)).collect();
            ensure!(!then.is_empty(), "H2: {} was never there", show(path));
            ensure!(then.iter().any(|(then, _)| then.kind == entry.kind), "H2: {} is {:?}", show(path), entry.kind);
            let is_new = !self.states[base].entries().contains_key(*path)
                || then.iter().any(|(_, id)| !self.states[base].has(*id));
            // Also accept content that a file had before it had this path, because names and data reach the disk
            // independently.
            let ids: BTreeSet<u64> = window.clone().filter_map(|state| self.states[state].id(path)).collect();
            let versions: Vec<_> = window.clone().flat_map(|state| ids.iter().map(move |id| (state, *id))).collect();
            let content = entry.kind == NodeKind::Directory
                || (is_new && entry.size == 0)
                || then.iter().any(|(then, _)| (then.size, then.content) == (entry.size, entry.content));
            if !content {
                self.verify_blocks(entry, read, &versions).with_context(|| format!("H2: {}", show(path)))?;
            }
            let nlink = then.iter().map(|(then, _)| then.nlink).max().unwrap_or(1);
            ensure!(
                entry.kind == NodeKind::Directory || entry.nlink <= nlink,
                "H3: {} has {} links, and never had more than {nlink}",
                show(path),
                entry.nlink
            );
        }
        // H3.
        let (first, rest) = candidates
            .iter()
            .next()
            .map(|&first| (first, candidates.iter().skip(1)))
            .unwrap_or((base, candidates.iter().skip(1)));
        let rest: Vec<usize> = rest.copied().collect();
        for &id in self.states[first].model.nodes.keys() {
            if id == ROOT || rest.iter().any(|&state| !self.states[state].has(id)) {
                continue;
            }
            let names = |&state: &usize| {
                let model = &self.states[state].model;
                let links = model.nodes.get(&id).map(|node| node.links.clone()).unwrap_or_default();
                links.into_iter().map(|(dir, name)| join(&model.path_of(dir, 0), &name)).collect::<Vec<_>>()
            };
            let named = candidates.iter().flat_map(names).any(|path| found.contains_key(path.as_slice()));
            ensure!(named, "H3: {} was never removed, and is lost", show(&self.states[first].model.path_of(id, 0)));
        }
        Ok(())
    }

    /// Checks H1.
    fn verify_fsync(
        &self,
        found: &BTreeMap<&[u8], &TreeEntry>,
        read: ReadFound<'_>,
        state: usize,
        path: &[u8],
        top: usize,
    ) -> Result<()> {
        let Some(id) = self.states[state].id(path) else { return Ok(()) };
        let later = &self.states[state..=top.max(state)];
        let what = format!("H1: {}, fsynced in state {state},", show(path));
        if later.iter().any(|state| !state.has(id)) {
            // The file was removed later. If it is still there, it must not be older than at the fsync.
            let is_only = later.iter().all(|state| state.id(path).is_none_or(|other| other == id));
            return match found.get(path) {
                Some(entry) if is_only && entry.kind == NodeKind::File => self
                    .verify_fsynced_at(found, read, state..=top.max(state), id, entry)
                    .with_context(|| format!("{what} and removed later")),
                _ => Ok(()),
            };
        }
        let names = |state: &State| -> Vec<Vec<u8>> {
            let links = state.model.nodes.get(&id).map(|node| node.links.clone()).unwrap_or_default();
            links.iter().map(|(dir, name)| join(&state.model.path_of(*dir, 0), name)).collect()
        };
        let allowed: BTreeSet<Vec<u8>> =
            if id == ROOT { BTreeSet::from([Vec::new()]) } else { later.iter().flat_map(&names).collect() };
        // An entry at one of these paths may be another file, because the found state may be older than the moment when
        // the fsynced file got the name. So it suffices that one of the entries matches the fsynced file.
        let places: Vec<&TreeEntry> = allowed.iter().filter_map(|path| found.get(path.as_slice()).copied()).collect();
        let mut verdict = Err(anyhow::anyhow!(
            "it is lost; it had the names {:?}",
            allowed.iter().map(|p| show(p)).collect::<Vec<_>>()
        ));
        for entry in places {
            verdict = self.verify_fsynced_at(found, read, state..=top.max(state), id, entry);
            if verdict.is_ok() {
                break;
            }
        }
        verdict.context(what.clone())?;
        // Check only names that the file lost before the fsync and did not get again. Skip names that another file had
        // since then, because that file may have the name now.
        for (index, before) in self.states[..state].iter().enumerate() {
            for name in names(before) {
                let since = &self.states[index + 1..=top.max(state)];
                let gone =
                    !allowed.contains(&name) && since.iter().all(|state| state.id(&name).is_none_or(|it| it == id));
                ensure!(!gone || !found.contains_key(name.as_slice()), "{what} is still at {}", show(&name));
            }
        }
        Ok(())
    }

    /// Checks H1 for the inode `id`, which was fsynced in the first state of the window. Assumes that `entry` is that
    /// inode, and fails if it cannot be.
    fn verify_fsynced_at(
        &self,
        found: &BTreeMap<&[u8], &TreeEntry>,
        read: ReadFound<'_>,
        window: RangeInclusive<usize>,
        id: u64,
        entry: &TreeEntry,
    ) -> Result<()> {
        let later = &self.states[window.clone()];
        let then: Vec<&TreeEntry> = later
            .iter()
            .flat_map(|state| state.entries().values().filter(|(_, other)| *other == id).map(|(e, _)| e))
            .collect();
        if entry.kind == NodeKind::Directory {
            return self.verify_fsynced_dir(found, *window.start(), id, &entry.path, *window.end());
        }
        let content = then.iter().any(|then| (then.size, then.content) == (entry.size, entry.content));
        if !content {
            let versions: Vec<_> = window.map(|state| (state, id)).collect();
            self.verify_blocks(entry, read, &versions).with_context(|| format!("at {}", show(&entry.path)))?;
        }
        ensure!(then.iter().any(|then| then.xattrs == entry.xattrs), "it lost its attributes");
        ensure!(then.iter().any(|then| then.mode == entry.mode), "it has mode {:o}", entry.mode);
        ensure!(then.iter().any(|then| (then.uid, then.gid) == (entry.uid, entry.gid)), "it has another owner");
        Ok(())
    }

    fn verify_fsynced_dir(
        &self,
        found: &BTreeMap<&[u8], &TreeEntry>,
        state: usize,
        dir: u64,
        found_at: &[u8],
        top: usize,
    ) -> Result<()> {
        let later = &self.states[state..=top.max(state)];
        let child = |state: &State, name: &Vec<u8>| {
            state.model.nodes.get(&dir).and_then(|node| node.children.get(name).copied())
        };
        let now = &self.states[state].model.nodes[&dir].children;
        for (name, id) in now {
            if later.iter().all(|state| child(state, name) == Some(*id)) {
                let path = join(found_at, name);
                ensure!(
                    found.contains_key(path.as_slice()),
                    "H1: {} was in an fsynced directory, and is lost",
                    show(&path)
                );
            }
        }
        for before in &self.states[..state] {
            let Some(node) = before.model.nodes.get(&dir) else { continue };
            for name in node.children.keys() {
                if later.iter().all(|state| child(state, name).is_none()) {
                    let path = join(found_at, name);
                    ensure!(
                        !found.contains_key(path.as_slice()),
                        "H1: {} was removed from an fsynced directory, and is back",
                        show(&path)
                    );
                }
            }
        }
        Ok(())
    }

    /// H2: each block equals one of its versions, and the size of the file lies between the smallest and the largest
    /// size of its versions.
    fn verify_blocks(&self, entry: &TreeEntry, read: ReadFound<'_>, versions: &[(usize, u64)]) -> Result<()> {
        ensure!(entry.kind == NodeKind::File, "it is {:?}, of {} bytes", entry.kind, entry.size);
        let nodes = versions.iter().filter_map(|(state, id)| self.states[*state].model.nodes.get(id));
        let nodes: Vec<_> = nodes.filter(|node| node.kind == NodeKind::File).collect();
        let least = nodes.iter().map(|node| node.size).min().unwrap_or(0);
        let most = nodes.iter().map(|node| node.size).max().unwrap_or(0);
        ensure!((least..=most).contains(&entry.size), "it has {} bytes, and had {least} to {most}", entry.size);
        let content = read(&entry.path)?;
        ensure!(content.len() as u64 == entry.size, "{} of {} bytes were read", content.len(), entry.size);
        for (index, block) in content.chunks(BLOCK).enumerate() {
            let at = (index * BLOCK) as u64;
            let is_version = |node: &&std::sync::Arc<crate::model::Node>| {
                let mut version = node.read(at, block.len());
                version.resize(block.len(), 0);
                version == block
            };
            ensure!(
                nodes.iter().any(is_version),
                "the block at {at} of {} bytes never was like that: {}",
                entry.size,
                nearest(block, nodes.iter().map(|node| node.read(at, block.len())))
            );
        }
        Ok(())
    }
}

/// A function that reads a whole file of the found filesystem.
pub type ReadFound<'r> = &'r dyn Fn(&[u8]) -> Result<Vec<u8>>;

/// Describes how a block differs from the most similar version.
fn nearest(block: &[u8], versions: impl Iterator<Item = Vec<u8>>) -> String {
    let differences = |version: Vec<u8>| {
        let at = |(at, byte): (usize, &u8)| (version.get(at).copied().unwrap_or(0) != *byte).then_some(at);
        block.iter().enumerate().filter_map(at).collect::<Vec<usize>>()
    };
    let zeros = block.iter().filter(|byte| **byte == 0).count();
    let Some(least) = versions.map(differences).min_by_key(Vec::len) else { return "there was none".to_owned() };
    let (first, last) = (least.first().copied().unwrap_or(0), least.last().copied().unwrap_or(0));
    format!("{zeros} bytes are zero, and {} from {first} to {last} differ from the nearest version", least.len())
}

const BLOCK: usize = 4096;
