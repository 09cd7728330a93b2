//! Delta blocks: the parts of a page in which two versions differ, named by a mask whose bit `n` is block `n`.
//! Migrations and protections send them.

fn named(mask: u64) -> impl Fn(&usize) -> bool {
    move |block| mask >> block & 1 == 1
}

/// The blocks of `block` bytes in which two versions of a page differ.
#[inline]
pub fn changed(old: &[u8], new: &[u8], block: usize) -> u64 {
    let blocks = old.chunks_exact(block).zip(new.chunks_exact(block)).enumerate();
    blocks.filter(|(_, (old, new))| old != new).fold(0, |mask, (at, _)| mask | 1 << at)
}

/// Appends the blocks of `page` that `mask` names to `out`.
#[inline]
pub fn gather(page: &[u8], mask: u64, block: usize, out: &mut Vec<u8>) {
    (0..page.len() / block)
        .filter(named(mask))
        .for_each(|at| out.extend_from_slice(&page[at * block..][..block]));
}

/// Overwrites the blocks of `page` that `mask` names with the first of `blocks`. Returns the others; none if
/// there are too few.
#[inline]
pub fn scatter<'a>(mut blocks: &'a [u8], mask: u64, block: usize, page: &mut [u8]) -> Option<&'a [u8]> {
    for at in (0..page.len() / block).filter(named(mask)) {
        let (first, rest) = blocks.split_at_checked(block)?;
        page[at * block..][..block].copy_from_slice(first);
        blocks = rest;
    }
    Some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_old_page_becomes_the_new_one(
            old in prop::collection::vec(0..2u8, 4096), new in prop::collection::vec(0..2u8, 4096),
            block in prop::sample::select(vec![64usize, 128, 256, 4096]), kept in any::<u64>(),
        ) {
            let mut new = new;
            // Some blocks stay as they were.
            for at in (0..4096 / block).filter(named(kept)) {
                new[at * block..][..block].copy_from_slice(&old[at * block..][..block]);
            }
            let (mask, mut blocks, mut page) = (changed(&old, &new, block), Vec::new(), old.clone());
            prop_assert_eq!(mask & kept & (u64::MAX >> (64 - 4096 / block)), 0);
            gather(&new, mask, block, &mut blocks);
            prop_assert_eq!(blocks.len(), mask.count_ones() as usize * block);
            blocks.push(9);
            prop_assert_eq!(scatter(&blocks, mask, block, &mut page), Some(&[9][..]));
            prop_assert!(page == new);
            prop_assert!(mask == 0 || scatter(&blocks[2..], mask, block, &mut page).is_none());
        }
    }
}
