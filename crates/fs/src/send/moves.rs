//! [`Moves`]: the names that change between two snapshots, and an order of commands in which no command meets a name
//! that is still used.
//!
//! The first walk over the difference removes names that vanish. The remaining inodes are *movers*: both snapshots have
//! them, but none of their old names stays. Each mover keeps one old name until it moves. Deleted directories that hold
//! movers are *late*: they are removed when the last mover has left.
//!
//! A move may have to wait for another move, for one of three reasons. The first two are dependencies on names, the
//! third is a dependency on the shape of the tree:
//!
//! 1. the new directory does not exist yet,
//! 2. a mover or a late directory still has the new name,
//! 3. a directory would move below itself, because a directory on the way to its new place has not moved yet.
//!
//! [`Moves::run`] follows the dependencies between moves depth first. A dependency on a directory or mover that is
//! waiting itself is a cycle. The waiting directory or mover of a cycle gets a temporary name in the subvolume's root
//! ("orphan"), which resolves all three kinds of dependency. So temporary names appear only in cycles.
//!
//! - M1. Each mover and late directory gets a temporary name at most once, and each move happens once, so the work
//!   ends.
//! - M2. A stack of tasks takes the place of recursion, because a chain of dependencies may be as long as the list of
//!   movers.

use std::collections::{HashMap, HashSet};

use ubtrfs_format::Ino;

use super::tree::{InodeLink, SentTree, is_dir, is_same, push_name};
use crate::error::Result;

/// A directory or mover, and the tree that its number belongs to: the old tree for inodes that both trees have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MoveNode {
    ino: u64,
    is_new: bool,
}

/// A change of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NameChange {
    /// Removes a name of a file.
    Unlink(Vec<u8>),
    /// Removes an empty directory.
    Rmdir(Vec<u8>),
    /// Renames.
    Rename(Vec<u8>, Vec<u8>),
    /// Makes a new directory.
    Mkdir(Vec<u8>, u64),
}

/// A change of names, and the directories whose times the change touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MoveStep {
    pub(super) change: NameChange,
    /// The directories of the old tree whose times the change touches.
    pub(super) touched: Vec<u64>,
}

/// The result of [`Moves::run`].
#[derive(Debug, Default)]
pub(super) struct MoveResult {
    /// Inode numbers of the new directories that commands have made so far.
    pub(super) made: HashSet<u64>,
    /// Inodes of both trees that the old tree has in a directory whose inode number belongs to another directory in the
    /// new tree. The paths of these inodes may have changed, although both trees have equal reference items for them.
    pub(super) relinked: HashSet<u64>,
}

/// The changes of names between two trees.
#[derive(Debug)]
pub(super) struct Moves<'t> {
    old: &'t SentTree,
    new: &'t SentTree,
    movers: Vec<Mover>,
    index: HashMap<MoveNode, usize>,
    dead: HashSet<u64>,
    late: HashMap<u64, Late>,
    /// Current places of movers, late directories and directories made so far. Every other inode has the place that its
    /// tree shows.
    places: HashMap<MoveNode, NamePlace>,
    /// Movers and late directories, by their current places.
    occupants: HashMap<NamePlace, MoveNode>,
    /// Inode numbers of the new directories that commands have made so far.
    made: HashSet<u64>,
    /// Inodes whose names were compared.
    compared: HashSet<u64>,
    replaced: Vec<u64>,
    paths: HashMap<MoveNode, Vec<u8>>,
    orphans: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NamePlace {
    parent: MoveNode,
    name: Vec<u8>,
}

#[derive(Debug)]
struct Mover {
    node: MoveNode,
    is_dir: bool,
    to: NamePlace,
    state: MoverState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MoverState {
    Waiting,
    /// The move has begun, and waits for another task.
    Begun,
    /// The mover has a temporary name, and waits.
    Orphan,
    Done,
}

/// A deleted directory that holds movers or other late directories.
#[derive(Debug, Default)]
struct Late {
    children: Vec<MoveNode>,
    left: usize,
    is_begun: bool,
    is_orphan: bool,
}

/// A task of [`Moves::run`] (M2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Task {
    Move(usize),
    Make(u64),
    Clear(u64),
}

/// The reason why a task waits after a step. `Nothing` means that the task has ended.
enum MoverWait {
    Nothing,
    For(Task),
    /// A temporary name was given; check again.
    Changed,
}

impl<'t> Moves<'t> {
    pub(super) fn new(old: &'t SentTree, new: &'t SentTree) -> Self {
        Self {
            old,
            new,
            movers: Vec::new(),
            index: HashMap::new(),
            dead: HashSet::new(),
            late: HashMap::new(),
            places: HashMap::new(),
            occupants: HashMap::new(),
            made: HashSet::new(),
            compared: HashSet::new(),
            replaced: Vec::new(),
            paths: HashMap::new(),
            orphans: 0,
        }
    }

    /// Whether both trees have this inode.
    pub(super) fn is_kept(&self, ino: u64) -> Result<bool> {
        Ok(match (self.old.inode(ino)?, self.new.inode(ino)?) {
            (Some(old), Some(new)) => is_same(ino, &old, &new),
            _ => false,
        })
    }

    fn node_of_new(&self, ino: u64) -> Result<MoveNode> {
        Ok(MoveNode { ino, is_new: !self.is_kept(ino)? })
    }

    /// Compares the names of an inode that both trees have. Returns the removed, the unchanged and the new names.
    pub(super) fn compare(&self, ino: u64) -> Result<(Vec<InodeLink>, Vec<InodeLink>, Vec<InodeLink>)> {
        let (old, new) = (self.old.links(ino)?, self.new.links(ino)?);
        let mut stays = Vec::new();
        for link in &old {
            if new.binary_search(link).is_ok() && self.is_kept(link.parent)? {
                stays.push(link.clone());
            }
        }
        let is_gone = |link: &InodeLink| stays.binary_search(link).is_err();
        let goes = old.into_iter().filter(|link| is_gone(link)).collect();
        let comes = new.into_iter().filter(|link| is_gone(link)).collect();
        Ok((goes, stays, comes))
    }

    /// Notes an inode that only the old tree has, or that the new tree replaces. Steps whose order does not matter are
    /// passed to `out` immediately.
    pub(super) fn deleted(
        &mut self,
        ino: u64,
        is_directory: bool,
        out: &mut impl FnMut(MoveStep) -> Result<()>,
    ) -> Result<()> {
        if is_directory {
            self.dead.insert(ino);
            if self.new.inode(ino)?.is_some_and(|item| is_dir(&item)) {
                self.replaced.push(ino);
            }
            return Ok(());
        }
        for link in self.old.links(ino)? {
            self.unlink(&link, out)?;
        }
        Ok(())
    }

    fn unlink(&self, link: &InodeLink, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<()> {
        out(MoveStep { change: NameChange::Unlink(self.old.path_of(link)?), touched: vec![link.parent] })
    }

    /// Notes an inode that both trees have and whose names changed. Steps whose order does not matter are passed to
    /// `out` immediately.
    pub(super) fn renamed(&mut self, ino: u64, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<()> {
        if ino == Ino::ROOT_DIR.0 || !self.compared.insert(ino) {
            return Ok(());
        }
        let (goes, stays, comes) = self.compare(ino)?;
        let mut goes = goes.into_iter();
        if stays.is_empty() {
            let (Some(from), Some(to)) = (goes.next(), comes.into_iter().next()) else {
                return Err(self.new.wrong("inode", ino, "expected names in both snapshots"));
            };
            let item = self.new.inode(ino)?;
            let to = NamePlace { parent: self.node_of_new(to.parent)?, name: to.name };
            let node = MoveNode { ino, is_new: false };
            self.index.insert(node, self.movers.len());
            let is_dir = item.is_some_and(|item| is_dir(&item));
            self.movers.push(Mover { node, is_dir, to, state: MoverState::Waiting });
            let from = NamePlace { parent: MoveNode { ino: from.parent, is_new: false }, name: from.name };
            self.occupants.insert(from.clone(), node);
            self.places.insert(node, from);
        }
        for link in goes {
            self.unlink(&link, out)?;
        }
        Ok(())
    }

    /// Orders all other changes and passes them to `out`.
    pub(super) fn run(mut self, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<MoveResult> {
        let mut relinked = HashSet::new();
        // If a directory's number was reused, the names in the directory look unchanged, so note its children as
        // renamed.
        for dir in std::mem::take(&mut self.replaced) {
            for child in self.old.children(dir)? {
                if self.is_kept(child)? {
                    relinked.insert(child);
                    self.renamed(child, out)?;
                }
            }
        }
        self.find_late(out)?;
        for mover in 0..self.movers.len() {
            self.finish(Task::Move(mover), out)?;
        }
        if let Some(dir) = self.late.keys().next() {
            return Err(self.old.wrong("deleted directory", *dir, "expected that it can be emptied"));
        }
        Ok(MoveResult { made: self.made, relinked })
    }

    /// Removes deleted directories that hold nothing that is still needed. The other deleted directories are *late*:
    /// they stay until the inodes that move out of them, and the deleted directories in them, have left.
    #[allow(clippy::arithmetic_side_effects, reason = "a count of names or directories in memory")]
    fn find_late(&mut self, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<()> {
        self.late = self.dead.iter().map(|dir| (*dir, Late::default())).collect();
        let mut inside: Vec<(u64, MoveNode)> = Vec::new();
        for mover in &self.movers {
            inside.push((self.places[&mover.node].parent.ino, mover.node));
        }
        for dir in &self.dead {
            let link = self.old.first_link(*dir)?;
            let node = MoveNode { ino: *dir, is_new: false };
            inside.push((link.parent, node));
            let place = NamePlace { parent: MoveNode { ino: link.parent, is_new: false }, name: link.name };
            self.occupants.insert(place.clone(), node);
            self.places.insert(node, place);
        }
        inside.sort_unstable_by_key(|(_, node)| node.ino);
        for (dir, node) in inside {
            if let Some(late) = self.late.get_mut(&dir) {
                late.children.push(node);
                late.left += 1;
            }
        }
        let mut empty: Vec<u64> = self.late.iter().filter(|(_, late)| late.left == 0).map(|(dir, _)| *dir).collect();
        empty.sort_unstable();
        for dir in empty {
            self.remove_late(dir, out)?;
        }
        Ok(())
    }

    /// Removes an empty late directory, and the late directories above it that become empty in turn.
    fn remove_late(&mut self, dir: u64, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<()> {
        let mut next = Some(dir);
        while let Some(dir) = next.take() {
            let node = MoveNode { ino: dir, is_new: false };
            let path = self.path(node)?;
            let place = self.places.remove(&node);
            self.late.remove(&dir);
            self.paths.remove(&node);
            let Some(place) = place else { continue };
            self.occupants.remove(&place);
            out(MoveStep { change: NameChange::Rmdir(path), touched: touched([place.parent]) })?;
            next = self.left(place.parent);
        }
        Ok(())
    }

    /// Notes that a mover or directory left a directory. Returns the directory that was left if it is late and now
    /// empty.
    #[allow(clippy::arithmetic_side_effects, reason = "a count of names or directories in memory")]
    fn left(&mut self, parent: MoveNode) -> Option<u64> {
        if parent.is_new {
            return None;
        }
        let late = self.late.get_mut(&parent.ino)?;
        late.left -= 1;
        (late.left == 0).then_some(parent.ino)
    }

    fn finish(&mut self, task: Task, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<()> {
        let mut tasks = vec![task];
        let mut making: HashSet<u64> = HashSet::new();
        while let Some(task) = tasks.last().copied() {
            let wait = match task {
                Task::Move(mover) => self.step_move(mover, &making, out)?,
                Task::Make(dir) => self.step_make(dir, &mut making, out)?,
                Task::Clear(dir) => self.step_clear(dir, out)?,
            };
            match wait {
                MoverWait::Nothing => {
                    tasks.pop();
                }
                MoverWait::For(task) => tasks.push(task),
                MoverWait::Changed => {}
            }
        }
        Ok(())
    }

    fn step_move(
        &mut self,
        index: usize,
        making: &HashSet<u64>,
        out: &mut impl FnMut(MoveStep) -> Result<()>,
    ) -> Result<MoverWait> {
        let (node, is_dir, to) = {
            let mover = &mut self.movers[index];
            match mover.state {
                MoverState::Done => return Ok(MoverWait::Nothing),
                MoverState::Waiting => mover.state = MoverState::Begun,
                MoverState::Begun | MoverState::Orphan => {}
            }
            (mover.node, mover.is_dir, mover.to.clone())
        };
        if to.parent.is_new && !self.made.contains(&to.parent.ino) {
            if self.is_being_made(to.parent, making)? {
                // The new directory of this mover, or one above it, waits until the mover's old name is free. So the
                // mover gets a temporary name, and moves after the directory is made.
                if self.movers[index].state != MoverState::Orphan {
                    self.orphan(node, out)?;
                }
                return Ok(MoverWait::Nothing);
            }
            return Ok(MoverWait::For(Task::Make(to.parent.ino)));
        }
        if let Some(wait) = self.wait_for_name(&to, node, out)? {
            return Ok(wait);
        }
        if is_dir && let Some(between) = self.below_itself(node, to.parent)? {
            let other = self.index[&between];
            return match self.movers[other].state {
                MoverState::Begun => self.orphan(between, out).map(|()| MoverWait::Changed),
                _ => Ok(MoverWait::For(Task::Move(other))),
            };
        }
        self.rename(node, to, out)?;
        self.movers[index].state = MoverState::Done;
        Ok(MoverWait::Nothing)
    }

    /// Whether a new directory or a new directory above it is in `making`.
    fn is_being_made(&self, dir: MoveNode, making: &HashSet<u64>) -> Result<bool> {
        let mut at = dir;
        for _ in 0..DEPTH_MAX {
            if !at.is_new || self.made.contains(&at.ino) {
                return Ok(false);
            }
            if making.contains(&at.ino) {
                return Ok(true);
            }
            at = self.node_of_new(self.new.first_link(at.ino)?.parent)?;
        }
        Err(self.new.wrong("directory", dir.ino, "expected a path of at most 4096 names to the root"))
    }

    fn step_make(
        &mut self,
        dir: u64,
        making: &mut HashSet<u64>,
        out: &mut impl FnMut(MoveStep) -> Result<()>,
    ) -> Result<MoverWait> {
        if self.made.contains(&dir) {
            return Ok(MoverWait::Nothing);
        }
        making.insert(dir);
        let link = self.new.first_link(dir)?;
        let parent = self.node_of_new(link.parent)?;
        if parent.is_new && !self.made.contains(&parent.ino) {
            if making.contains(&parent.ino) {
                return Err(self.new.wrong("directory", dir, "expected a path to the root"));
            }
            return Ok(MoverWait::For(Task::Make(parent.ino)));
        }
        let node = MoveNode { ino: dir, is_new: true };
        let place = NamePlace { parent, name: link.name };
        if let Some(wait) = self.wait_for_name(&place, node, out)? {
            return Ok(wait);
        }
        self.places.insert(node, place);
        let path = self.path(node)?;
        out(MoveStep { change: NameChange::Mkdir(path, dir), touched: touched([parent]) })?;
        self.made.insert(dir);
        making.remove(&dir);
        Ok(MoverWait::Nothing)
    }

    fn step_clear(&mut self, dir: u64, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<MoverWait> {
        let Some(late) = self.late.get_mut(&dir) else { return Ok(MoverWait::Nothing) };
        if late.is_orphan {
            return Ok(MoverWait::Nothing);
        }
        late.is_begun = true;
        while let Some(child) = self.late.get(&dir).and_then(|late| late.children.last().copied()) {
            let is_here = match self.index.get(&child) {
                Some(mover) => !matches!(self.movers[*mover].state, MoverState::Done | MoverState::Orphan),
                None => self.late.get(&child.ino).is_some_and(|late| !late.is_orphan),
            };
            if !is_here {
                self.late.get_mut(&dir).and_then(|late| late.children.pop());
                continue;
            }
            let is_begun = match self.index.get(&child) {
                Some(mover) => self.movers[*mover].state == MoverState::Begun,
                None => self.late[&child.ino].is_begun,
            };
            if is_begun {
                // A mover or directory in this directory is waiting already (a cycle), so this directory itself gets a
                // temporary name.
                self.orphan(MoveNode { ino: dir, is_new: false }, out)?;
                return Ok(MoverWait::Nothing);
            }
            let task = self.index.get(&child).map_or(Task::Clear(child.ino), |mover| Task::Move(*mover));
            return Ok(MoverWait::For(task));
        }
        Ok(MoverWait::Nothing)
    }

    /// Returns the reason to wait if another directory or mover has the name that `node` needs.
    fn wait_for_name(
        &mut self,
        place: &NamePlace,
        node: MoveNode,
        out: &mut impl FnMut(MoveStep) -> Result<()>,
    ) -> Result<Option<MoverWait>> {
        let Some(occupant) = self.occupants.get(place).copied().filter(|occupant| *occupant != node) else {
            return Ok(None);
        };
        if let Some(mover) = self.index.get(&occupant).copied() {
            return match self.movers[mover].state {
                MoverState::Waiting => Ok(Some(MoverWait::For(Task::Move(mover)))),
                _ => self.orphan(occupant, out).map(|()| Some(MoverWait::Changed)),
            };
        }
        let is_begun = self.late.get(&occupant.ino).is_none_or(|late| late.is_begun);
        if is_begun {
            return self.orphan(occupant, out).map(|()| Some(MoverWait::Changed));
        }
        Ok(Some(MoverWait::For(Task::Clear(occupant.ino))))
    }

    /// The mover that has to leave before `node` can move into `parent`; `None` if `parent` does not lie in `node`.
    #[allow(clippy::arithmetic_side_effects, reason = "a count of names or directories in memory")]
    fn below_itself(&self, node: MoveNode, parent: MoveNode) -> Result<Option<MoveNode>> {
        let mut first = None;
        let mut at = parent;
        let mut depth = 0;
        while at.ino != Ino::ROOT_DIR.0 {
            if at == node {
                let lost = || self.new.wrong("directory", node.ino, "expected that it does not lie in itself");
                return first.ok_or_else(lost).map(Some);
            }
            if first.is_none() && self.index.get(&at).is_some_and(|mover| self.movers[*mover].state != MoverState::Done)
            {
                first = Some(at);
            }
            at = self.place(at)?.parent;
            depth += 1;
            if depth > DEPTH_MAX {
                return Err(self.old.wrong("directory", node.ino, "expected a path to the root"));
            }
        }
        Ok(None)
    }

    fn rename(&mut self, node: MoveNode, to: NamePlace, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<()> {
        let from_path = self.path(node)?;
        let from = self.place(node)?;
        self.occupants.remove(&from);
        self.places.insert(node, to.clone());
        let is_file = self.index.get(&node).is_some_and(|mover| !self.movers[*mover].is_dir);
        if !is_file {
            // The paths of everything below the directory have changed, so forget the remembered paths.
            self.paths.clear();
        }
        let to_path = self.path(node)?;
        out(MoveStep { change: NameChange::Rename(from_path, to_path), touched: touched([from.parent, to.parent]) })?;
        match self.left(from.parent) {
            Some(empty) => self.remove_late(empty, out),
            None => Ok(()),
        }
    }

    /// Gives a directory or mover a temporary name (M1).
    #[allow(clippy::arithmetic_side_effects, reason = "a count of names or directories in memory")]
    fn orphan(&mut self, node: MoveNode, out: &mut impl FnMut(MoveStep) -> Result<()>) -> Result<()> {
        match self.index.get(&node).copied() {
            Some(mover) => self.movers[mover].state = MoverState::Orphan,
            None => {
                if let Some(late) = self.late.get_mut(&node.ino) {
                    late.is_orphan = true;
                }
            }
        }
        let generation = self.old.inode(node.ino)?.map_or(0, |item| item.generation.0);
        let name = loop {
            let name = format!("o{}-{generation}-{}", node.ino, self.orphans).into_bytes();
            self.orphans += 1;
            if !self.old.has_root_name(&name)? && !self.new.has_root_name(&name)? {
                break name;
            }
        };
        let place = NamePlace { parent: MoveNode { ino: Ino::ROOT_DIR.0, is_new: false }, name };
        self.occupants.insert(place.clone(), node);
        self.rename(node, place, out)
    }

    fn place(&self, node: MoveNode) -> Result<NamePlace> {
        if let Some(place) = self.places.get(&node) {
            return Ok(place.clone());
        }
        let link = if node.is_new { self.new.first_link(node.ino)? } else { self.old.first_link(node.ino)? };
        let parent =
            if node.is_new { self.node_of_new(link.parent)? } else { MoveNode { ino: link.parent, is_new: false } };
        Ok(NamePlace { parent, name: link.name })
    }

    /// The current path of a directory or mover.
    fn path(&mut self, node: MoveNode) -> Result<Vec<u8>> {
        let mut names = Vec::new();
        let mut at = node;
        let mut path = loop {
            if at.ino == Ino::ROOT_DIR.0 {
                break Vec::new();
            }
            if let Some(known) = self.paths.get(&at) {
                break known.clone();
            }
            if names.len() > DEPTH_MAX {
                return Err(self.old.wrong("directory", node.ino, "expected a path of at most 4096 names to the root"));
            }
            let place = self.place(at)?;
            names.push((at, place.name));
            at = place.parent;
        };
        for (at, name) in names.into_iter().rev() {
            push_name(&mut path, &name);
            // Remember paths of directories only, because only these are needed again.
            if at != node {
                self.paths.insert(at, path.clone());
            }
        }
        Ok(path)
    }
}

/// The directories among `parents` that both trees have; their times change.
fn touched(parents: impl IntoIterator<Item = MoveNode>) -> Vec<u64> {
    parents.into_iter().filter(|parent| !parent.is_new).map(|parent| parent.ino).collect()
}

/// Maximum number of names in a path.
const DEPTH_MAX: usize = 4096;
