//! The extent tree: extent items, their references, and the delayed refs that change them.
//!
//! An extent has one item, `EXTENT_ITEM` (its length in the key) or, for a tree block with skinny metadata,
//! `METADATA_ITEM` (its level in the key). References are inline in the extent's item as long as they fit; further
//! references are separate items ("keyed"). While an extent has a keyed reference, its new references are keyed too, as
//! in the kernel.
//!
//! I1. After the delayed refs of an extent (its head) are applied, `refs` of the extent's item is the sum of the counts
//! of its inline and keyed references.
//! I2. Inline references are in ascending order of type; references of one type are in descending order of offset or
//! hash.
//! I3. A reference is inline or keyed, never both.
//! I4. The batch is sorted: heads come sorted by bytenr, and all items of an extent have its bytenr as objectid.

use std::collections::BTreeMap;

use ubtrfs_error::{Error, Result, side_by_side};
use ubtrfs_format::hash::extent_data_ref_hash;
use ubtrfs_format::item::{ExtentDataRef, ExtentFlags, ExtentItem, InlineRef, TreeBlockInfo};
use ubtrfs_format::node::{ITEM_HEAD_SIZE, LeafBuilder};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, KeyType, Logical, RootId};
use ubtrfs_space::{DelayedRefHead, Extent, ExtentKind, OwnerMark, RefKey};
use ubtrfs_tree::{Batch, Cursor, NodeSource, RootPtr};

use crate::delayed::data_ledger::DataLedger;
use crate::engine::FilesystemGeometry;
use crate::nodes::leaf_ahead::{LeafAheadWalk, REACH_MAX};
use crate::nodes::threads::nr_threads;

/// Sizes and features that the extent tree depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LedgerConfig<'a> {
    pub(crate) geometry: FilesystemGeometry,
    /// `Some` while simple quotas are enabled.
    pub(crate) simple: Option<SimpleConfig<'a>>,
}

/// Parameters for counting by simple quotas.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimpleConfig<'a> {
    /// The transaction that enabled simple quotas. Extents of earlier transactions are not counted.
    pub(crate) since: Generation,
    /// The data extents of the transaction, and their first users.
    pub(crate) ledger: &'a DataLedger,
}

/// The result of running delayed refs.
#[derive(Debug, Default)]
pub(crate) struct ExtentChanges {
    /// Changes of the extent tree.
    pub(crate) batch: Batch,
    /// Extents that get an item.
    pub(crate) added: Vec<Extent>,
    /// Extents that lose their item, and whether they hold data.
    pub(crate) removed: Vec<(Extent, bool)>,
    /// Extents that quotas must count again.
    pub(crate) owners: Vec<OwnerChange>,
    /// With simple quotas, for each tree: the bytes of the new extents that it allocated, and the bytes of its extents
    /// that were freed.
    pub(crate) charges: Charges,
}

/// Bytes that each tree gained and lost.
pub(crate) type Charges = BTreeMap<RootId, (u64, u64)>;

/// An extent whose users may have changed, for the accounting of quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnerChange {
    /// The extent.
    pub(crate) extent: Extent,
    /// Whether the extent is a tree block.
    pub(crate) is_tree: bool,
    /// The trees in the extent's references before the change.
    pub(crate) before: ExtentOwners,
    /// The trees in the extent's references after the change.
    pub(crate) after: ExtentOwners,
    /// The trees whose ids are in the added data references. Only the trees in `gained` can be new users of a data
    /// extent.
    pub(crate) gained: ExtentOwners,
    /// Whether it is known that only the subvolume in `before` reached the extent before the change. If false, other
    /// subvolumes may have reached the extent.
    pub(crate) was_private: bool,
}

/// The trees whose ids appear in the references of an extent. A tree shares blocks with its snapshots, so even a single
/// tree id may stand for several users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtentOwners {
    /// The extent has no references.
    None,
    /// All references carry this tree's id.
    Sole(RootId),
    /// References carry ids of several trees, or addresses.
    Many,
}

impl ExtentOwners {
    /// The trees whose ids are in the data references that the deltas of the head add.
    fn gained(head: &DelayedRefHead) -> Self {
        let mut owner = Self::None;
        for (reference, delta) in head.deltas.iter() {
            if let RefKey::Data { root, .. } = *reference
                && delta > 0
            {
                owner = match owner {
                    Self::None => Self::Sole(root),
                    Self::Sole(known) if known == root => owner,
                    _ => return Self::Many,
                };
            }
        }
        owner
    }

    fn of(item: &ExtentItem, has_keyed: bool) -> Self {
        let mut owner = if item.refs == 0 { Self::None } else { Self::Many };
        for inline in &item.inline_refs {
            let root = match inline {
                InlineRef::TreeBlock(root) => *root,
                InlineRef::ExtentData(data) => data.root,
                InlineRef::Owner(_) => continue,
                InlineRef::SharedBlock(_) | InlineRef::SharedData { .. } => return Self::Many,
            };
            owner = match owner {
                Self::Sole(known) if known != root => return Self::Many,
                _ if has_keyed => return Self::Many,
                _ => Self::Sole(root),
            };
        }
        owner
    }
}

/// An extent item without its references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExtentHeader {
    /// The sum of the counts of all references.
    pub(crate) refs: u64,
    /// Flags.
    pub(crate) flags: ExtentFlags,
    /// Transaction that allocated the extent.
    pub(crate) generation: Generation,
}

/// Turns delayed refs (sorted by bytenr) into changes of the extent tree. A long list is run on several threads.
pub(crate) fn run_delayed_refs(
    source: &dyn NodeSource,
    root: &RootPtr,
    mut heads: impl ExactSizeIterator<Item = DelayedRefHead>,
    config: &LedgerConfig<'_>,
) -> Result<ExtentChanges> {
    let nr_parts = nr_threads().min(heads.len() / PART_HEADS);
    if nr_parts < 2 {
        return run_part(source, root, heads, config);
    }
    let part_len = heads.len().div_ceil(nr_parts);
    let works = (0..nr_parts).map(|_| {
        let part: Vec<DelayedRefHead> = heads.by_ref().take(part_len).collect();
        move || run_part(source, root, part, config)
    });
    let mut changes = ExtentChanges::default();
    for part in side_by_side(works) {
        let ExtentChanges { batch, added, removed, owners, charges } = part?;
        changes.batch.extend(batch);
        changes.added.extend(added);
        changes.removed.extend(removed);
        changes.owners.extend(owners);
        for (root, (gained, lost)) in charges {
            let charge = changes.charges.entry(root).or_default();
            *charge = (charge.0.saturating_add(gained), charge.1.saturating_add(lost));
        }
    }
    Ok(changes)
}

fn run_part(
    source: &dyn NodeSource,
    root: &RootPtr,
    heads: impl IntoIterator<Item = DelayedRefHead>,
    config: &LedgerConfig<'_>,
) -> Result<ExtentChanges> {
    let mut changes = ExtentChanges::default();
    let mut scan = ForwardScan::new(source, *root);
    let mut probe = Cursor::new(source, *root);
    for head in heads {
        let mut record = ExtentUpdate::load(&mut scan, &mut probe, &head, config)?;
        record.add_owner();
        record.apply_deltas()?;
        record.finish(&mut changes)?;
    }
    Ok(changes)
}

/// Returns the item of the extent at `bytenr`, skinny or not.
pub(crate) fn lookup_extent(
    source: &dyn NodeSource,
    root: &RootPtr,
    bytenr: Logical,
    len_bytes: u64,
    is_tree: bool,
) -> Result<Option<ExtentHeader>> {
    let mut cursor = Cursor::new(source, *root);
    let mut key = cursor.seek_ge(&first_key(bytenr))?;
    // A tree block's skinny item sorts after an item for data. (Valid trees do not have both at one address.)
    while let Some(found) = key.filter(|key| key.objectid == bytenr.0 && key.item_type <= KeyType::METADATA_ITEM) {
        let skinny = is_tree && found.item_type == KeyType::METADATA_ITEM;
        if skinny || (found.item_type == KeyType::EXTENT_ITEM && found.offset == len_bytes) {
            let item = ExtentItem::decode(found.item_type, cursor.data().unwrap_or_default())
                .map_err(|cause| Error::from(cause).in_tree(root.tree).at(bytenr))?;
            return Ok(Some(ExtentHeader { refs: item.refs, flags: item.flags, generation: item.generation }));
        }
        key = cursor.next()?;
    }
    Ok(None)
}

/// A cursor that only moves forward, in single steps if the target is near. Announces the next leaves to its source.
struct ForwardScan<'s> {
    source: &'s dyn NodeSource,
    cursor: Cursor<'s>,
    started: bool,
    walk: LeafAheadWalk,
    /// The parent and slot of the last leaf.
    leaf: Option<(Logical, usize)>,
}

/// An extent whose head is being applied.
struct ExtentUpdate<'a, 's> {
    head: &'a DelayedRefHead,
    config: &'a LedgerConfig<'a>,
    probe: &'a mut Cursor<'s>,
    /// The key of the extent's item on disk, if there is one.
    found: Option<Key>,
    before: Option<ExtentItem>,
    item: ExtentItem,
    /// Whether the extent tree on disk has a keyed reference to the extent.
    has_keyed: bool,
    /// Keyed references examined so far, with their counts on disk and after the head is applied.
    keyed: BTreeMap<Key, KeyedRef>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeyedRef {
    before: Option<InlineRef>,
    after: Option<InlineRef>,
}

/// The place of a keyed reference: a free key for a new item, and the existing item of the reference, if there is one.
struct KeyedPlace {
    free: Option<Key>,
    found: Option<(Key, InlineRef)>,
}

/// Minimum number of heads for each thread: fewer heads are not worth a thread and a copy of all heads in memory.
const PART_HEADS: usize = if cfg!(test) { 4 } else { 128 << 10 };
/// Maximum number of steps towards a target. If the target is farther away, a new search from the root is cheaper than
/// more steps.
const STEPS_MAX: usize = 16;
/// Data references with equal hashes lie at consecutive offsets. A search looks at no more than this number of offsets.
const HASH_CHAIN_MAX: u64 = 1024;

impl<'s> ForwardScan<'s> {
    fn new(source: &'s dyn NodeSource, root: RootPtr) -> Self {
        Self { source, cursor: Cursor::new(source, root), started: false, walk: LeafAheadWalk::default(), leaf: None }
    }

    /// Moves to the first item that is not below `key`.
    fn advance(&mut self, key: &Key) -> Result<Option<Key>> {
        let found = self.seek(key)?;
        self.announce();
        Ok(found)
    }

    fn seek(&mut self, key: &Key) -> Result<Option<Key>> {
        if self.started {
            let mut at = self.cursor.key();
            for _ in 0..STEPS_MAX {
                match at {
                    Some(found) if found < *key => at = self.cursor.next()?,
                    _ => return Ok(at),
                }
            }
        }
        self.started = true;
        self.cursor.seek_ge(key)
    }

    fn announce(&mut self) {
        let Some((parent, slot)) = self.cursor.parent() else { return };
        let leaf = Some((parent.bytenr(), slot));
        if std::mem::replace(&mut self.leaf, leaf) == leaf {
            return;
        }
        let [next, _] = self.walk.step(parent.bytenr(), slot, parent.nritems(), REACH_MAX);
        if !next.is_empty() {
            let tree = self.cursor.root().tree;
            let ptrs: Vec<_> = next.map(|slot| parent.child_ptr(slot, tree)).collect();
            self.source.will_read(&ptrs);
        }
    }
}

impl<'a, 's> ExtentUpdate<'a, 's> {
    fn load(
        scan: &mut ForwardScan<'s>,
        probe: &'a mut Cursor<'s>,
        head: &'a DelayedRefHead,
        config: &'a LedgerConfig<'a>,
    ) -> Result<Self> {
        let bytenr = head.extent.bytenr;
        let mut record = Self {
            head,
            config,
            probe,
            found: None,
            before: None,
            item: new_item(head, config),
            has_keyed: false,
            keyed: BTreeMap::new(),
        };
        let mut key = scan.advance(&first_key(bytenr))?;
        while let Some(found) = key.filter(|key| is_extent_key(key, bytenr)) {
            if found.item_type > KeyType::METADATA_ITEM {
                record.has_keyed = true;
                break;
            }
            if record.found.is_some() || !record.expects(&found) {
                return Err(record.corrupt("key offset", found.offset, "expected one item, of this length or level"));
            }
            let item = ExtentItem::decode(found.item_type, scan.cursor.data().unwrap_or_default())
                .map_err(|cause| Error::from(cause).in_tree(RootId::EXTENT_TREE).at(bytenr))?;
            record.found = Some(found);
            record.before = Some(item.clone());
            record.item = item;
            key = scan.cursor.next()?;
        }
        let (flags, is_data) = (record.item.flags, head.kind == ExtentKind::Data);
        if flags.contains(ExtentFlags::DATA) != is_data || flags.contains(ExtentFlags::TREE_BLOCK) == is_data {
            return Err(record.corrupt("flags", flags.bits(), "expected data or tree block, as it is used"));
        }
        // A head that only marks an extent for quotas may find no item: the extent may have been created and dropped
        // since the delayed refs were last run.
        let has_only_flags = head.deltas.is_empty() && head.changes_item();
        if record.found.is_none() && (record.has_keyed || has_only_flags) {
            return Err(record.corrupt("refs", 0, "expected an extent item for a referenced extent"));
        }
        Ok(record)
    }

    /// Whether the item of the extent can have this key.
    fn expects(&self, key: &Key) -> bool {
        match self.head.kind {
            ExtentKind::Tree { level, .. } if key.item_type == KeyType::METADATA_ITEM => key.offset == u64::from(level),
            _ => key.item_type == KeyType::EXTENT_ITEM && key.offset == self.head.extent.len_bytes,
        }
    }

    /// With simple quotas, gives a new data extent its owner reference.
    fn add_owner(&mut self) {
        if let Some(simple) = &self.config.simple
            && self.found.is_none()
            && self.head.kind == ExtentKind::Data
            && let Some(root) = self.new_owner(simple)
        {
            self.item.inline_refs.push(InlineRef::Owner(root));
        }
    }

    /// The tree that allocated a new extent. For a data extent, a new reference alone does not show this tree, because
    /// other trees may already use the extent.
    fn new_owner(&self, simple: &SimpleConfig<'_>) -> Option<RootId> {
        let of_ref = |reference: &RefKey| match *reference {
            RefKey::TreeBlock(root) | RefKey::Data { root, .. } => Some(root),
            RefKey::SharedBlock(_) | RefKey::SharedData(_) => None,
        };
        let head = self.head;
        let put = || simple.ledger.allocator(head.extent.bytenr).filter(|_| head.kind == ExtentKind::Data);
        let added = || head.deltas.iter().filter(|(_, delta)| *delta > 0).find_map(|(reference, _)| of_ref(reference));
        head.allocated_by.or_else(put).or_else(added)
    }

    /// With simple quotas, charges a new extent to its owner, or takes back the charge of an extent whose item is
    /// deleted. The item of a data extent names the owner; the owner of a tree block is the tree that allocated it.
    fn charge(&self, changes: &mut ExtentChanges) {
        let Some(simple) = &self.config.simple else { return };
        let recorded = self.item.inline_refs.iter().find_map(|inline| match inline {
            InlineRef::Owner(root) => Some(*root),
            _ => None,
        });
        let is_tree = self.head.kind != ExtentKind::Data;
        let is_new = self.found.is_none();
        let owner = match is_new {
            true if is_tree => self.new_owner(simple),
            false if is_tree => self.head.allocated_by,
            _ => recorded,
        };
        let Some(owner) = owner.filter(|root| root.is_subvolume() && self.item.generation >= simple.since) else {
            return;
        };
        let (gained, lost) = changes.charges.entry(owner).or_default();
        let sum = if is_new { gained } else { lost };
        *sum = sum.saturating_add(self.head.extent.len_bytes);
    }

    /// Applies the deltas of the head. Deltas that drop references come first, because they make room in the item.
    fn apply_deltas(&mut self) -> Result<()> {
        let head = self.head;
        for (reference, delta) in head.deltas.iter().filter(|(_, delta)| *delta < 0) {
            self.drop_ref(reference, delta.unsigned_abs())?;
        }
        for (reference, delta) in head.deltas.iter().filter(|(_, delta)| *delta > 0) {
            self.add_ref(reference, delta.unsigned_abs())?;
        }
        self.item.flags |= head.set_flags;
        Ok(())
    }

    fn drop_ref(&mut self, reference: &RefKey, count: u64) -> Result<()> {
        let refs = self.item.refs.checked_sub(count);
        self.item.refs =
            refs.ok_or_else(|| self.corrupt("refs", self.item.refs, "expected no fewer than are dropped"))?;
        if let Some(at) = self.inline_position(reference) {
            let rest = self.less(self.item.inline_refs[at], count)?;
            match rest {
                Some(rest) => self.item.inline_refs[at] = rest,
                None => drop(self.item.inline_refs.remove(at)),
            }
            return Ok(());
        }
        let Some((key, found)) = self.keyed_position(reference)?.found else {
            return Err(self.corrupt("reference to", owner_of(reference), "expected the reference that is dropped"));
        };
        let rest = self.less(found, count)?;
        self.set_keyed(key, rest);
        Ok(())
    }

    fn add_ref(&mut self, reference: &RefKey, count: u64) -> Result<()> {
        let refs = self.item.refs.checked_add(count);
        self.item.refs = refs.ok_or_else(|| self.corrupt("refs", self.item.refs, "expected room for more"))?;
        if let Some(at) = self.inline_position(reference) {
            self.item.inline_refs[at] = self.more(self.item.inline_refs[at], count)?;
            return Ok(());
        }
        let may_be_inline = !self.has_keyed && self.keyed.values().all(|keyed| keyed.after.is_none());
        let fresh = self.counted(uncounted(reference), count)?;
        if may_be_inline && self.fits_inline(&fresh) {
            let order = |inline: &InlineRef| (inline.key_type(), std::cmp::Reverse(inline.key_offset()));
            let at = self.item.inline_refs.partition_point(|inline| order(inline) <= order(&fresh));
            self.item.inline_refs.insert(at, fresh);
            return Ok(());
        }
        let place = self.keyed_position(reference)?;
        match place.found {
            Some((key, found)) => {
                let sum = self.more(found, count)?;
                self.set_keyed(key, Some(sum));
            }
            None => {
                let key =
                    place.free.ok_or_else(|| self.corrupt("hash chain", HASH_CHAIN_MAX, "expected a shorter one"))?;
                self.set_keyed(key, Some(fresh));
            }
        }
        Ok(())
    }

    fn inline_position(&self, reference: &RefKey) -> Option<usize> {
        self.item.inline_refs.iter().position(|inline| RefKey::of(inline).as_ref() == Some(reference))
    }

    /// Whether another inline reference fits: an item stays below a sixteenth of a leaf, as in the kernel.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "sizes of references of one item, which is at most as large as a leaf"
    )]
    fn fits_inline(&self, inline: &InlineRef) -> bool {
        let limit = LeafBuilder::capacity(self.config.geometry.nodesize as usize) / 16 - ITEM_HEAD_SIZE;
        let size = |inline: &InlineRef| match inline {
            InlineRef::ExtentData(_) => 1 + ExtentDataRef::SIZE,
            InlineRef::SharedData { .. } => 13,
            InlineRef::TreeBlock(_) | InlineRef::SharedBlock(_) | InlineRef::Owner(_) => 9,
        };
        let info = self.item.tree_block.map_or(0, |_| TreeBlockInfo::SIZE);
        let now: usize = self.item.inline_refs.iter().map(size).sum();
        // An extent item always has room for its first reference, even in the smallest leaves.
        self.item.inline_refs.is_empty() || ExtentItem::HEADER_SIZE + info + now + size(inline) < limit
    }

    fn keyed_position(&mut self, reference: &RefKey) -> Result<KeyedPlace> {
        let base = Key::new(self.head.extent.bytenr.0, reference.key_type(), key_offset(reference));
        let chain = if matches!(reference, RefKey::Data { .. }) { HASH_CHAIN_MAX } else { 1 };
        let end = Key { offset: base.offset.saturating_add(chain.saturating_sub(1)), ..base };
        // Collect the references on disk, then the changes of this head, which take precedence.
        let mut on_disk = BTreeMap::new();
        let mut key = if self.has_keyed { self.probe.seek_ge(&base)? } else { None };
        while let Some(found) = key.filter(|key| *key <= end) {
            let decoded = InlineRef::decode_keyed(&found, self.probe.data().unwrap_or_default())
                .map_err(|cause| Error::from(cause).in_tree(RootId::EXTENT_TREE).at(self.head.extent.bytenr))?;
            on_disk.insert(found, decoded);
            if RefKey::of(&decoded).as_ref() == Some(reference) {
                break;
            }
            key = self.probe.next()?;
        }
        for (key, before) in &on_disk {
            self.keyed.entry(*key).or_insert(KeyedRef { before: Some(*before), after: Some(*before) });
        }
        let mut free = None;
        let mut next = base;
        for (key, keyed) in self.keyed.range(base..=end) {
            if *key != next {
                free.get_or_insert(next);
            }
            match keyed.after {
                Some(after) if RefKey::of(&after).as_ref() == Some(reference) => {
                    return Ok(KeyedPlace { free, found: Some((*key, after)) });
                }
                Some(_) => {}
                None => drop(free.get_or_insert(*key)),
            }
            next = Key { offset: key.offset.saturating_add(1), ..base };
        }
        if next <= end {
            free.get_or_insert(next);
        }
        Ok(KeyedPlace { free, found: None })
    }

    fn set_keyed(&mut self, key: Key, after: Option<InlineRef>) {
        self.keyed.entry(key).or_insert(KeyedRef { before: None, after: None }).after = after;
    }

    /// The reference with its count raised by `count`. A tree or node refers to a tree block only once, so the count of
    /// such a reference cannot grow.
    fn more(&self, reference: InlineRef, count: u64) -> Result<InlineRef> {
        self.counted(reference, u64::from(reference.count()).saturating_add(count))
    }

    fn counted(&self, reference: InlineRef, count: u64) -> Result<InlineRef> {
        u32::try_from(count).ok().and_then(|count| with_count(reference, count)).ok_or_else(|| {
            let expected = "expected 1 of a tree block, and less than 2^32 of data";
            self.corrupt("reference count", count, expected)
        })
    }

    /// The reference with its count lowered by `count`, or `None` if the count becomes 0.
    fn less(&self, reference: InlineRef, count: u64) -> Result<Option<InlineRef>> {
        let rest = u64::from(reference.count()).checked_sub(count).ok_or_else(|| {
            self.corrupt("reference count", reference.count().into(), "expected no fewer than are dropped")
        })?;
        if rest == 0 { Ok(None) } else { self.counted(reference, rest).map(Some) }
    }

    fn finish(mut self, changes: &mut ExtentChanges) -> Result<()> {
        let head = self.head;
        self.note_owners(changes);
        if self.item.refs == 0 {
            return self.finish_removed(changes);
        }
        let key = self.found.unwrap_or_else(|| new_key(head, self.config));
        if self.before.as_ref() != Some(&self.item) {
            changes.batch.push((key, Some(self.item.encode().into())));
        }
        if self.found.is_none() {
            changes.added.push(head.extent);
            self.charge(changes);
        }
        for (key, keyed) in std::mem::take(&mut self.keyed) {
            if keyed.before != keyed.after {
                changes.batch.push((key, keyed.after.map(|after| after.encode_keyed().into())));
            }
        }
        Ok(())
    }

    fn note_owners(&self, changes: &mut ExtentChanges) {
        if self.head.owners == OwnerMark::Same {
            return;
        }
        let has_keyed = self.has_keyed || self.keyed.values().any(|keyed| keyed.after.is_some());
        let before = self.before.as_ref().map_or(ExtentOwners::None, |before| ExtentOwners::of(before, self.has_keyed));
        let after = ExtentOwners::of(&self.item, has_keyed);
        if (before, after) != (ExtentOwners::None, ExtentOwners::None) {
            changes.owners.push(OwnerChange {
                extent: self.head.extent,
                is_tree: self.head.kind != ExtentKind::Data,
                before,
                after,
                gained: ExtentOwners::gained(self.head),
                was_private: self.head.owners == OwnerMark::WasPrivate,
            });
        }
    }

    fn finish_removed(mut self, changes: &mut ExtentChanges) -> Result<()> {
        let counting = self.item.inline_refs.iter().find_map(RefKey::of);
        if let Some(left) = counting.or(self.keyed_left()?) {
            return Err(self.corrupt("reference to", owner_of(&left), "expected none when refs are 0"));
        }
        if let Some(key) = self.found {
            changes.batch.push((key, None));
            self.charge(changes);
            changes.removed.push((self.head.extent, self.head.kind == ExtentKind::Data));
        }
        let deleted = self.keyed.iter().filter(|(_, keyed)| keyed.before.is_some());
        changes.batch.extend(deleted.map(|(key, _)| (*key, None)));
        Ok(())
    }

    /// A keyed reference that remains after the head is applied.
    fn keyed_left(&mut self) -> Result<Option<RefKey>> {
        if let Some(after) = self.keyed.values().find_map(|keyed| keyed.after) {
            return Ok(RefKey::of(&after));
        }
        let bytenr = self.head.extent.bytenr;
        let first = Key::new(bytenr.0, KeyType::EXTENT_OWNER_REF, 0);
        let mut key = if self.has_keyed { self.probe.seek_ge(&first)? } else { None };
        while let Some(found) = key.filter(|key| is_extent_key(key, bytenr)) {
            if !self.keyed.contains_key(&found) {
                let left = InlineRef::decode_keyed(&found, self.probe.data().unwrap_or_default())
                    .map_err(|cause| Error::from(cause).in_tree(RootId::EXTENT_TREE).at(bytenr))?;
                return Ok(RefKey::of(&left));
            }
            key = self.probe.next()?;
        }
        Ok(None)
    }

    fn corrupt(&self, field: &'static str, value: u64, expected: &'static str) -> Error {
        let cause = FormatError::Value { what: "extent item", field, value, expected };
        Corrupt::new(cause).in_tree(RootId::EXTENT_TREE).at(self.head.extent.bytenr).into()
    }
}

fn first_key(bytenr: Logical) -> Key {
    Key::new(bytenr.0, KeyType::EXTENT_ITEM, 0)
}

/// Whether this is the key of the extent's item or of one of its keyed references.
fn is_extent_key(key: &Key, bytenr: Logical) -> bool {
    key.objectid == bytenr.0 && (KeyType::EXTENT_ITEM..=KeyType::SHARED_DATA_REF).contains(&key.item_type)
}

fn new_key(head: &DelayedRefHead, config: &LedgerConfig<'_>) -> Key {
    match head.kind {
        ExtentKind::Tree { level, .. } if config.geometry.skinny => {
            Key::new(head.extent.bytenr.0, KeyType::METADATA_ITEM, level.into())
        }
        _ => Key::new(head.extent.bytenr.0, KeyType::EXTENT_ITEM, head.extent.len_bytes),
    }
}

/// The item of a new extent, without references.
fn new_item(head: &DelayedRefHead, config: &LedgerConfig<'_>) -> ExtentItem {
    let (flags, tree_block) = match head.kind {
        ExtentKind::Tree { level, first_key } => {
            (ExtentFlags::TREE_BLOCK, (!config.geometry.skinny).then_some(TreeBlockInfo { key: first_key, level }))
        }
        ExtentKind::Data => (ExtentFlags::DATA, None),
    };
    ExtentItem { refs: 0, generation: head.generation, flags, tree_block, inline_refs: Vec::new() }
}

/// The inline form of a reference, with count 0 for data.
fn uncounted(reference: &RefKey) -> InlineRef {
    match *reference {
        RefKey::TreeBlock(root) => InlineRef::TreeBlock(root),
        RefKey::SharedBlock(parent) => InlineRef::SharedBlock(parent),
        RefKey::Data { root, ino, offset } => {
            InlineRef::ExtentData(ExtentDataRef { root, objectid: ino, offset, count: 0 })
        }
        RefKey::SharedData(parent) => InlineRef::SharedData { parent, count: 0 },
    }
}

/// The reference with this count. A tree block's count can only be 1.
fn with_count(reference: InlineRef, count: u32) -> Option<InlineRef> {
    match reference {
        InlineRef::ExtentData(data) => Some(InlineRef::ExtentData(ExtentDataRef { count, ..data })),
        InlineRef::SharedData { parent, .. } => Some(InlineRef::SharedData { parent, count }),
        InlineRef::TreeBlock(_) | InlineRef::SharedBlock(_) | InlineRef::Owner(_) => (count == 1).then_some(reference),
    }
}

fn key_offset(reference: &RefKey) -> u64 {
    match *reference {
        RefKey::TreeBlock(root) => root.0,
        RefKey::SharedBlock(parent) | RefKey::SharedData(parent) => parent.0,
        RefKey::Data { root, ino, offset } => extent_data_ref_hash(root, ino, offset),
    }
}

/// The referring tree or node, for messages.
fn owner_of(reference: &RefKey) -> u64 {
    match *reference {
        RefKey::TreeBlock(root) | RefKey::Data { root, .. } => root.0,
        RefKey::SharedBlock(parent) | RefKey::SharedData(parent) => parent.0,
    }
}

#[cfg(test)]
mod tests;
