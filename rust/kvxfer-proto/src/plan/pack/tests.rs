use super::*;

const SIDE: [Span; 2] = [Span { addr: 1 << 63, len: 4096 }, Span { addr: (1 << 63) + 8192, len: 4096 }];
const SLOT: Span = Span { addr: 1 << 20, len: 1024 };

fn piece(src_region: u32, src_off: u64, dst_off: u64, len: u64) -> Piece {
    Piece { src_region, src_off, dst_region: 0, dst_off, len }
}

fn tokens(count: u64, row: u64, stride: u64) -> Vec<Piece> {
    (0..count).map(|t| piece(0, 64 + t * stride, t * row, row)).collect()
}

#[test]
fn a_pages_rows_are_one_stripe() {
    let mut stripes = Stripes::new();
    stripes.pack(&tokens(16, 64, 256), &SIDE, Span { len: 4096, ..SLOT }).unwrap();
    let whole =
        Stripe { src: (1 << 63) + 64, dst: SLOT.addr, src_stride: 256, dst_stride: 64, row: 64, rows: 16 };
    assert_eq!(stripes.list(), [whole]);
    assert_eq!(stripes.bytes(), 1024);
    assert_eq!(stripes.copies().count(), 16);
    assert_eq!(stripes.copies().last().unwrap().src, (1 << 63) + 64 + 15 * 256);
}

#[test]
fn what_touches_on_both_sides_is_one_row() {
    let mut stripes = Stripes::new();
    stripes.pack(&tokens(4, 64, 64), &SIDE, SLOT).unwrap();
    assert_eq!((stripes.list().len(), stripes.list()[0].row, stripes.list()[0].rows), (1, 256, 1));
    stripes.unpack(&tokens(4, 64, 64), SLOT, &SIDE).unwrap();
    assert_eq!((stripes.list()[0].src, stripes.list()[0].dst), (SLOT.addr, 1 << 63));
}

#[test]
fn shuffled_pages_keep_their_rows_together() {
    let mut pieces = Vec::new();
    for page in [3, 0, 2, 1] {
        pieces.extend((0..4).map(|t| piece(0, page * 1024 + t * 256, 0, 32)));
    }
    let mut stripes = Stripes::new();
    stripes.pack(&pieces, &SIDE, SLOT).unwrap();
    assert!(stripes.list().iter().all(|s| (s.row, s.rows, s.src_stride, s.dst_stride) == (32, 4, 256, 32)));
    assert_eq!(stripes.list().len(), 4);
}

#[test]
fn rows_that_descend_or_overlap_stay_apart() {
    for offs in [[512, 256], [256, 272]] {
        let pieces = offs.map(|off| piece(0, off, off, 32));
        let mut stripes = Stripes::new();
        stripes.direct(&pieces, &SIDE, &[Span { addr: 1 << 30, len: 4096 }]).unwrap();
        assert_eq!(stripes.list().len(), 2, "{offs:?}");
    }
}

#[test]
fn large_rows_do_not_join_at_a_distance_that_narrows_their_units() {
    let mut stripes = Stripes::new();
    stripes.push(0, 1 << 20, 4096).unwrap();
    stripes.push(8193, (1 << 20) + 8193, 4096).unwrap();
    assert_eq!(stripes.list().len(), 2);
    stripes.push(20481, (1 << 20) + 20481, 4096).unwrap();
    assert_eq!(stripes.list().len(), 2, "12,288 further is");
}

#[test]
fn out_of_bounds_is_refused_with_the_numbers_and_leaves_nothing() {
    let mut stripes = Stripes::new();
    let bad = |region, off, len| [piece(0, 0, 0, 8), piece(region, off, 0, len)];
    let err = stripes.pack(&bad(2, 0, 8), &SIDE, SLOT).unwrap_err();
    assert_eq!(err.to_string(), "a piece names region 2, and its side has 2 regions");
    let err = stripes.pack(&bad(1, 4090, 7), &SIDE, SLOT).unwrap_err();
    assert_eq!(err.to_string(), "7 bytes at offset 4090 do not fit into a source region of 4096 bytes");
    let err = stripes.pack(&bad(1, u64::MAX, 2), &SIDE, SLOT).unwrap_err();
    assert!(matches!(err, PackError::OutOfBounds { off: u64::MAX, len: 2, .. }), "{err}");
    let err = stripes.pack(&bad(1, 0, 1017), &SIDE, SLOT).unwrap_err();
    assert_eq!(err.to_string(), "1017 bytes at offset 8 do not fit into a staging slot of 1024 bytes");
    let err = stripes.unpack(&[piece(0, 0, 4095, 2)], SLOT, &SIDE).unwrap_err();
    assert!(err.to_string().contains("a destination region"), "{err}");
    assert_eq!(stripes, Stripes::new());
    stripes.pack(&bad(1, 0, 1016), &SIDE, SLOT).unwrap();
}

#[test]
fn memory_may_end_at_the_last_address_and_not_after_it() {
    let top = |addr| [Span { addr, len: 4096 }];
    let mut stripes = Stripes::new();
    stripes.pack(&[piece(0, 4000, 0, 96)], &top(u64::MAX - 4095), SLOT).unwrap();
    assert_eq!(stripes.list()[0].src, u64::MAX - 95);
    let err = stripes.pack(&[piece(0, 0, 0, 1)], &top(u64::MAX - 4094), SLOT).unwrap_err();
    assert_eq!(err, PackError::Wraps { addr: u64::MAX - 4094, size: 4096 });
    assert!(matches!(stripes.push(u64::MAX, 0, 2), Err(PackError::Wraps { .. })));
    stripes.push(0, 0, 1 << 62).unwrap();
    assert!(matches!(stripes.push(0, 1 << 62, 1 << 62), Err(PackError::OutOfBounds { .. })));
    assert_eq!(stripes.bytes(), 1 << 62);
}

#[test]
fn apply_refuses_rows_out_of_its_buffers() {
    let mut stripes = Stripes::new();
    stripes.push(6, 0, 3).unwrap();
    let mut dst = [0; 4];
    let err = stripes.apply(&[1; 8], &mut dst).unwrap_err();
    assert_eq!(err.to_string(), "3 bytes at offset 6 do not fit into the source of 8 bytes");
    stripes.apply(&[1; 9], &mut dst).unwrap();
    assert_eq!(dst, [1, 1, 1, 0]);
    assert!(stripes.apply(&[1; 9], &mut [0; 2]).unwrap_err().to_string().contains("the destination of 2"));
}

#[test]
fn a_table_counts_tiles_and_cuts_what_starts_badly() {
    let mut stripes = Stripes::new();
    // 4 KiB, aligned: 256 units of 16 bytes.
    stripes.push(0, 1 << 20, 4096).unwrap();
    // The same distance from a multiple of 16 on both sides: 7 bytes, 4080 as they should be, 9 bytes.
    stripes.push((1 << 16) + 9, (1 << 21) + 9, 4096).unwrap();
    // Never aligned to each other: one byte at a time.
    stripes.push(1 << 17, (1 << 22) + 1, 256).unwrap();
    let table = Table::new(&stripes);
    let rows = table.stripes().iter().map(|s| (s.row, table::unit_bytes(s))).collect::<Vec<_>>();
    assert_eq!(rows, [(4096, 16), (7, 1), (4080, 16), (9, 1), (256, 1)]);
    assert_eq!(table.first(), [0, 2, 3, 5, 6, 8]);
    assert_eq!(table.tiles(), 8);
    let mut words = vec![7];
    assert_eq!(table.encode(&mut words), 5 * 48);
    assert_eq!(words.len(), 1 + 5 * 48 + 6 * 8);
    assert_eq!(&words[1 + 8..1 + 16], (1u64 << 20).to_le_bytes());
    assert_eq!(Table::new(&Stripes::new()).first(), [0]);
}
